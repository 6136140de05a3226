"""Count the tokens of each expert over the global batch: to balance routers by their bias, and to show the loads.

Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, 2024, as in
DeepSeek-V3. transformers has the bias (`e_score_correction_bias`), and never changes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.host_copy import HostCopy
from hvdtrain.state.divided import whole_shape
from hvdtrain.training.loop.step_part import StepPart

_NAME = re.compile(r"router|gate", re.IGNORECASE)
_KIND = re.compile(r"router|gat(e|ing)$", re.IGNORECASE)
BIAS = "e_score_correction_bias"
EVERY = 10
"""Steps between two records of the loads."""


class RouterLoads(StepPart):
    """The tokens that the routers of a model give to each expert in a step, summed over the ranks that train together.

    After an applied step, experts with fewer tokens than the mean of their layer become more likely: their router's
    bias grows by `rate`, that of the others falls. The counts are whole numbers of the global batch, so that this does
    not depend on the number of ranks.

    Args:
        routers: by name; each has as many experts in every pass.
        rate: 0 to change no bias.
        counts: whether this rank's passes count.
        event: records an event, on rank 0: the loads of all ranks, or of worker 0.
    """

    def __init__(
        self,
        routers: Mapping[str, nn.Module],
        comm: Comm,
        rate: float,
        event: Callable[[dict[str, Any]], None],
        *,
        counts: bool = True,
    ) -> None:
        self._routers, self._comm, self._rate, self._event, self._counts = routers, comm, rate, event, counts
        self._shows, self._last_shown = comm.rank == 0, -1
        self._is_counting = False
        self._chosen: dict[str, list[Tensor]] = {name: [] for name in routers}
        self._alike: dict[int, list[str]] = {}  # by the number of experts
        for name, router in routers.items():
            weight: Any = router.weight
            self._alike.setdefault(whole_shape(weight)[0], []).append(name)
        self._numbers = torch.zeros(sum(len(names) * (size + 2) for size, names in self._alike.items())).double()
        self._tables: list[tuple[TokenCounter, list[str], Tensor]] = []  # of routers alike, with their part of these
        self._handle: Handle | None = None
        self._shown: tuple[int, HostCopy] | None = None
        self._own: HostCopy | None = None  # the busiest expert's share in each router, in the passes of this rank
        self._keeps_own = False
        self._hooks = [
            router.register_forward_hook(lambda _, inputs, output, name=name: self._on_forward(name, output))
            for name, router in routers.items()
        ]

    def begin(self, count: int) -> None:  # noqa: D102
        if not self._tables:
            device = next(parameter.device for router in self._routers.values() for parameter in router.parameters())
            self._numbers = self._numbers.to(device)
            tables = zip(self._alike.items(), self._divided(self._numbers), strict=True)
            self._tables = [(TokenCounter(size, device), names, counts) for (size, names), counts in tables]
        self._numbers.zero_()
        self._chosen = {name: [] for name in self._routers}

    def _divided(self, numbers: Tensor) -> list[Tensor]:
        """Return the counts of routers alike, (L, experts + 2), as parts of all."""
        sizes = [(len(names), size + 2) for size, names in self._alike.items()]
        parts = torch.split(numbers, [rows * columns for rows, columns in sizes])
        return [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]

    @contextmanager
    def around_forward(self, batch: Any) -> Iterator[None]:  # noqa: D102
        self._is_counting = self._counts
        try:
            yield
        finally:
            self._is_counting = False
        self._count()

    def _count(self) -> None:
        """Add a pass. Layers are counted together: on a GPU, starting an operation takes longer than the operation."""
        for counter, names, counts in self._tables:
            parts = [self._chosen[name] for name in names]
            if [len(part) for part in parts] == [1] * len(parts) and len({part[0].shape for part in parts}) == 1:
                counter.add(counts, torch.stack([part[0] for part in parts]).flatten(1))
            else:
                for row, ids in ((row, ids) for row, part in zip(counts, parts, strict=True) for ids in part):
                    counter.add(row, ids.flatten())
            for part in parts:
                part.clear()

    def _on_forward(self, name: str, output: Any) -> None:
        if self._is_counting and (found := chosen_experts(output)) is not None:
            self._chosen[name].append(found[0])

    def start(self) -> None:  # noqa: D102
        if self._keeps_own:
            loads = [counts[:, 1:-1] for _, _, counts in self._tables]
            self._own = HostCopy(torch.cat([each.amax(dim=1) / each.sum(dim=1) for each in loads]))
            self._keeps_own = False
        self._handle = self._comm.allreduce(self._numbers, name="experts/loads")

    def finish(self, step: int, *, applied: bool) -> None:
        """Wait for the sums; change the biases if the step was applied. Collective: yes."""
        assert self._handle is not None
        self._handle.wait()
        self._show()
        if applied and self._rate:
            self._change_biases()
        if step % EVERY == 0 and self._shows and step != self._last_shown:  # several workers may take this step
            self._shown, self._last_shown = (step, HostCopy(self._numbers.clone())), step

    def among(self, comm: Comm) -> RouterLoads:
        """Count for some of the ranks from now on: those of a worker. Its biases are part of its own buffers."""
        self._comm = comm
        return self

    def own_share(self) -> float:
        """Return the largest share that one expert of a router has got of this rank's tokens; NaN if unknown.

        In the step after the last call. Call it some steps later, so that it waits for no device.
        """
        copy, self._own, self._keeps_own = self._own, None, self._counts
        shares = [] if copy is None else copy.tolist()
        return max((share for share in shares if not math.isnan(share)), default=math.nan)

    def _change_biases(self) -> None:
        """Change the biases of all routers with as many experts in few operations: a GPU waits for their start."""
        for _, names, counts in self._tables:
            found = [(row, self._routers[name]._buffers.get(BIAS)) for row, name in enumerate(names)]
            biases = {row: bias for row, bias in found if bias is not None}
            if not biases:
                continue
            loads_LE = counts[:, 1:-1]
            signs_LE = torch.sign(loads_LE.mean(dim=1, keepdim=True) - loads_LE).to(next(iter(biases.values())))
            rows = signs_LE.unbind()
            torch._foreach_add_([*biases.values()], [rows[row] for row in biases], alpha=self._rate)

    def _show(self) -> None:
        """Record the loads of an earlier step: by now they are on the host."""
        if self._shown is None:
            return
        (step, copy), self._shown = self._shown, None
        layers, tables = {}, self._divided(torch.tensor(copy.tolist(), dtype=torch.float64))
        for names, counts in zip(self._alike.values(), tables, strict=True):
            for name, loads in zip(names, counts[:, 1:-1].tolist(), strict=True):
                busiest = max(loads) * len(loads) / sum(loads) if sum(loads) else math.nan  # over the mean
                layers[name] = {"tokens": sum(loads), "busiest": busiest, "entropy": _entropy(loads)}
        self._event({"event": "experts", "at_step": step, "layers": {name: layers[name] for name in self._routers}})


def _entropy(loads: list[float]) -> float:
    """Return the entropy of the loads over that of equal loads: 1 if all are equal, 0 if one expert has all."""
    shares = [load / sum(loads) for load in loads if load]
    return -sum(share * math.log(share) for share in shares) / math.log(len(loads)) if shares else math.nan


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers that have a weight for each expert, by name: modules that are named router or gate."""
    found = {}
    for name, module in model.named_modules():
        if _NAME.fullmatch(name.rpartition(".")[2]) or _KIND.search(type(module).__name__):
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and whole_shape(weight)[0] > 1:
                found[name] = module
    return found


class TokenCounter:
    """Counts how often each expert was chosen: (..., experts + 2), float64.

    First come the negative indices, then the experts, last the larger indices, which otherwise would end training.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self._bounds = torch.arange(experts + 1, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)

    def zeros(self, *shape: int) -> Tensor:
        """Return counts of nothing."""
        return self._one.new_zeros(*shape, len(self._bounds) + 1)

    @torch.no_grad()
    def add(self, counts: Tensor, chosen: Tensor) -> Tensor:
        """Add the indices along the last dimension of `chosen` to `counts`; return these.

        `bincount` would make the host wait for the device.
        """
        places = torch.bucketize(chosen.long(), self._bounds, right=True)
        return counts.scatter_add_(-1, places, self._one.expand(places.shape))


def chosen_experts(output: Any) -> tuple[Tensor, int] | None:
    """Return the indices of the chosen experts in what a router returns, and the number of experts; None without."""
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, (tuple, list)) else []
    chosen = next((part for part in parts if part.dtype in (torch.int32, torch.int64)), None)
    experts = max([0, *(part.shape[-1] for part in parts if part.is_floating_point() and part.dim() > 1)])
    return (chosen, experts) if chosen is not None and experts > 1 else None
