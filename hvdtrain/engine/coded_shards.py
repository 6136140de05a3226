"""What a divided optimizer with a compression keeps: residuals, and exact parameters apart from the model's.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023. Unlike there, what
the encoding of an update of the parameters loses is sent with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression.coding import Coding
from hvdtrain.compression.table import Compression
from hvdtrain.exchange.coded_shard_bucket import CodedShardBucket
from hvdtrain.exchange.residuals import Residuals, Undelivered
from hvdtrain.exchange.shard_bucket import Shared
from hvdtrain.state.exchange_state import MASTER, ROUNDED, Owned
from hvdtrain.state.pieces import Place


class CodedShards(Residuals):
    """Buckets that sum encoded gradients at their owners, and send encoded updates of parameters to all ranks.

    Owners keep exact parameters apart from the model's. Those of the model are equal on all ranks, and exact only after
    `synchronize_state`. A checkpoint contains exact ones, and those of the model as part of the exchange's state.

    Args:
        compression: has a coding.
        comm: the ranks.

    Attributes:
        undelivered: of an earlier exchange; the engine sets these three.
        complete: waits for the parameters of the last step. Collective.
        owned: returns what this rank owns.
    """

    undelivered: Undelivered
    complete: Callable[[], None]
    owned: Callable[[], Mapping[str, Owned]]

    def __init__(self, compression: Compression, comm: Comm) -> None:
        self._compression, self._comm = compression, comm
        self._codings: dict[torch.device, Coding | None] = {}
        self._buckets: list[CodedShardBucket] = []
        self._is_inexact = False  # whether the model's parameters may differ from the exact ones

    @property
    def keeps_error(self) -> bool:
        """Whether the compression uses error feedback."""
        return self._compression.kind.feedback

    def make_bucket(self, shared: Shared) -> CodedShardBucket:
        """Return a bucket."""
        device = shared.layout.shape.device
        if device not in self._codings:
            self._codings[device] = self._compression.load_coding(device)
        coding = self._codings[device]
        assert coding is not None
        bucket = CodedShardBucket(shared, coding, keep_error=self.keeps_error)
        self._buckets.append(bucket)
        return bucket

    def begin_spread(self, skipped: Tensor | None) -> None:
        """Note that owners have updated exact parameters; `skipped` is 1 if the device has not."""
        for bucket in self._buckets:
            bucket.applied = None if skipped is None else 1 - skipped
        self._is_inexact = True

    def take_changes(self) -> None:
        """Make exact what a program has written to the model's parameters since the last step."""
        for bucket in self._buckets:
            bucket.take_changes()

    def commit(self, *, applied: bool) -> None:  # noqa: D102
        self.undelivered.commit(applied=applied)
        for bucket in self._buckets:
            bucket.commit(applied=applied)

    def rescale(self, factor: float) -> None:  # noqa: D102
        self.undelivered.rescale(factor)
        for bucket in self._buckets:
            bucket.rescale(factor)

    def synchronize_state(self) -> None:
        """Make residuals equal on all ranks, and the model's parameters exact. Collective: yes."""
        self.complete()
        for bucket in self._buckets:
            bucket.synchronize_state()
            if self._is_inexact:
                bucket.gather_exactly()
        self._is_inexact = False

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return residuals as they are after `synchronize_state`, and exact parameters. Collective: yes."""
        return self._state([bucket.residuals(averaged=True) for bucket in self._buckets])

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the residuals, and the exact parameters that this rank owns if the model's may differ from them."""
        values = {"plan": None, "ranks": self._comm.size, "inexact": self._is_inexact}
        return self._state([bucket.residuals() for bucket in self._buckets]), values

    def _state(self, residuals: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        undelivered, _ = self.undelivered.state_dict()
        found = {key: tensor / self._comm.size for key, tensor in undelivered.items()}
        for bucket, of_bucket in zip(self._buckets, residuals, strict=True):
            for key, tensor in of_bucket.items():
                found[key] = found[key].to(tensor) + tensor if key in found else tensor
            found |= bucket.masters() if self._is_inexact else {}
        return found

    def state_place(self, key: str) -> Place | None:  # noqa: D102
        return self.owned()[key.rpartition("/")[0]].place if key.endswith(MASTER) else None

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return all ranks, if the compression uses error feedback."""
        return range(self._comm.size if self.keeps_error else 0)

    def keeps(self, key: str) -> bool:
        """Return True: also rounded values of the model."""
        return True

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load residuals, and exact or rounded parameters if there are any; otherwise those of the model are exact."""
        rounded = {key: tensors[key] for key in tensors if key.endswith(ROUNDED)}
        tensors = {key: tensors[key] for key in tensors if key not in rounded}
        loaded = {p.name for bucket in self._buckets if bucket.keeps_error for p in bucket.layout.shape.parts}
        rest = {key: tensors[key] for key in tensors if key.rpartition("/")[0] not in loaded}
        self.undelivered.load_state_dict(rest, values)
        for bucket in self._buckets:
            bucket.load_state_dict(tensors, int(values["ranks"]))
            bucket.load_rounded(rounded)
        self._is_inexact = bool(rounded or values.get("inexact"))
