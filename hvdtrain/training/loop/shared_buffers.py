"""Keep persistent buffers equal on all ranks, such as running statistics, which each rank writes differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.errors import ETC, DriftError, listed
from hvdtrain.training.diagnostics.drift import find_unequal
from hvdtrain.training.loop.buffers import persistent_buffers
from hvdtrain.training.loop.step_part import StepPart

Policy = Literal["mean", "broadcast", "check"]


@dataclass
class SharedBuffers(StepPart):
    """Finds buffers that differ between ranks, and makes them equal after every step from then on.

    Statistics of batch norm, codebooks and biases of routers depend on a rank's samples. Hashes find them after the
    first applied step; the caller may add others later. The mean weights each rank by its micro-batches. Values that
    are not floating-point come from rank 0. Buffers that are not persistent are caches: each rank keeps its own.
    """

    model: nn.Module
    comm: Comm
    policy: Policy = "mean"  # mean over ranks; broadcast rank 0's values; or check: raise an error if they differ
    say: Callable[[str], None] = lambda line: None  # shows a line
    _names: list[str] = field(default_factory=list)
    _is_checked: bool = False
    _count: int = 1
    _under_way: list[tuple[list[Tensor], Tensor, Handle]] = field(default_factory=list)

    def begin(self, count: int) -> None:  # noqa: D102
        self._count = count

    def start(self) -> None:
        """Begin to make the buffers equal after the forward passes of this rank. Collective: yes."""
        buffers = persistent_buffers(self.model) if self._names else {}
        by_dtype: dict[torch.dtype | None, list[Tensor]] = {}
        for name in self._names:
            averaged = self.policy == "mean" and buffers[name].is_floating_point()
            dtype = torch.promote_types(buffers[name].dtype, torch.float32) if averaged else None
            by_dtype.setdefault(dtype, []).append(buffers[name])
        for dtype, group in by_dtype.items():
            name = f"buffers/{dtype or 'bytes'}"
            if dtype is None:
                flat = torch.cat([buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in group])
                handle = self.comm.broadcast(flat, name=name, root=0)
            else:
                flat = torch.cat(
                    [buffer.detach().reshape(-1).to(dtype) for buffer in group] + [group[0].new_ones(1, dtype=dtype)]
                )
                handle = self.comm.allreduce(flat.mul_(self._count), name=name)
            self._under_way.append((group, flat, handle))

    def wait(self) -> None:  # noqa: D102
        for _, _, handle in self._under_way:
            handle.wait()

    def finish(self, step: int, *, applied: bool) -> None:
        """Wait, and use the shared values if the step was applied. Collective: yes.

        Errors: DriftError: on every rank, if buffers differ and are only checked.
        """
        self.wait()
        for buffers, flat, _ in self._under_way:
            if applied:
                _unpack(flat, buffers)
        self._under_way = []
        if applied and not self._is_checked and self.comm.size > 1:
            self._is_checked = True
            if persistent := persistent_buffers(self.model):
                self.share(find_unequal(persistent, self.comm, name="buffers/differing"))

    def among(self, comm: Comm) -> SharedBuffers:  # noqa: D102
        return SharedBuffers(self.model, comm, self.policy, self.say)

    def share(self, found: Mapping[str, list[int]]) -> None:
        """Make these buffers equal, now and after every step. Collective: yes.

        `found` names them, with the ranks that differ from rank 0; equal on all ranks.

        Errors: DriftError: on every rank, if buffers are only checked.
        """
        if not found:
            return
        names = listed(found, rest=ETC)
        if self.policy == "check":
            ranks = sorted({rank for ranks in found.values() for rank in ranks})
            raise DriftError(
                f"buffers are not equal on all ranks: {names} on rank(s) {', '.join(map(str, ranks))}",
                expected="bit-equal persistent buffers after every step",
                next_step="--parallel.buffers mean, or broadcast for the values of rank 0",
            )
        how = "averaged over ranks" if self.policy == "mean" else "taken from rank 0"
        self.say(f"{len(found)} buffer(s) differ between ranks ({names}): {how} after every step")
        before, self._names = self._names, list(found)
        self.start()
        self.finish(0, applied=True)
        self._names = [*before, *(name for name in found if name not in before)]


def _unpack(flat: Tensor, buffers: list[Tensor]) -> None:
    """Write rank 0's bytes, or the weighted mean of the sums in `flat`, to the buffers."""
    is_mean = flat.is_floating_point()
    if is_mean:
        flat = flat[:-1] / flat[-1]
    start = 0
    with torch.no_grad():
        for buffer in buffers:
            end = start + buffer.numel() * (1 if is_mean else buffer.element_size())
            part = flat[start:end]
            # A copy of the bytes is aligned for every dtype.
            buffer.copy_((part if is_mean else part.clone().view(buffer.dtype)).reshape(buffer.shape))
            start = end
