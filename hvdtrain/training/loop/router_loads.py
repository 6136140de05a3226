"""Count the tokens of each expert over the global batch: to balance routers by their bias, and to show the loads.

Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, 2024, as in
DeepSeek-V3. transformers has the bias (`e_score_correction_bias`), and never changes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.host_copy import HostCopy
from hvdtrain.state.divided import whole_shape
from hvdtrain.training.diagnostics.experts import chosen_experts, count_tokens, find_routers
from hvdtrain.training.loop.step_part import StepPart

BIAS = "e_score_correction_bias"
EVERY = 10
"""Steps between two records of the loads."""


class RouterLoads(StepPart):
    """The tokens that the routers of a model give to each expert in a step, summed over all ranks.

    After an applied step, experts with fewer tokens than the mean of their layer become more likely: their router's
    bias grows by `rate`, that of the others falls. The counts are whole numbers of the global batch, so that this does
    not depend on the number of ranks.

    Args:
        routers: by name; each has as many experts in every pass.
        rate: 0 to change no bias.
        counts: whether this rank's passes count.
        event: records an event, on rank 0.
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
        self._is_counting = False
        self._chosen: dict[str, list[Tensor]] = {name: [] for name in routers}
        self._loads: dict[str, Tensor] = {}
        self._handle: Handle | None = None
        self._shown: tuple[int, dict[str, int], HostCopy] | None = None
        self._hooks = [
            router.register_forward_hook(lambda _, inputs, output, name=name: self._on_forward(name, output))
            for name, router in routers.items()
        ]

    def begin(self, count: int) -> None:
        """Start a step."""
        self._loads.clear()
        self._chosen = {name: [] for name in self._routers}

    @contextmanager
    def around_forward(self, batch: Any) -> Iterator[None]:
        """Count the forward pass within."""
        self._is_counting = self._counts
        try:
            yield
        finally:
            self._is_counting = False
        self._count()

    def _count(self) -> None:
        """Add a pass. Layers are counted together: on a GPU, starting an operation takes longer than the operation."""
        alike: defaultdict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
        for name, parts in self._chosen.items():
            if parts:
                ids = torch.cat(parts) if len(parts) > 1 else parts[0]
                alike[_experts(self._routers[name]), len(ids)][name] = ids
                parts.clear()
        for (experts, _), layers in alike.items():
            loads = count_tokens(torch.stack([*layers.values()]), experts)[:, :experts]
            for name, load in zip(layers, loads, strict=True):
                self._loads[name] = self._loads[name] + load if name in self._loads else load

    def _on_forward(self, name: str, output: Any) -> None:
        if self._is_counting and (found := chosen_experts(output)) is not None:
            self._chosen[name].append(found[0].flatten())

    def start(self) -> None:
        """Begin to sum the loads over ranks. Collective: yes."""
        device = next(parameter.device for router in self._routers.values() for parameter in router.parameters())
        sizes = {name: _experts(router) for name, router in self._routers.items()}
        parts = [self._loads.get(name, torch.zeros(size, device=device).double()) for name, size in sizes.items()]
        self._handle = self._comm.allreduce(torch.cat(parts), name="experts/loads")

    def finish(self, step: int, *, applied: bool) -> None:
        """Wait for the sums; change the biases if the step was applied. Collective: yes."""
        assert self._handle is not None
        sums = self._handle.wait()
        self._show()
        sizes = {name: _experts(router) for name, router in self._routers.items()}
        if applied and self._rate:
            self._change_biases(torch.split(sums, [*sizes.values()]))
        if step % EVERY == 0 and self._comm.rank == 0:
            self._shown = step, sizes, HostCopy(sums.clone())

    def _change_biases(self, loads: Sequence[Tensor]) -> None:
        """Change the biases of all routers with as many experts in few operations: a GPU waits for their start."""
        alike: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for router, load in zip(self._routers.values(), loads, strict=True):
            if (bias := router._buffers.get(BIAS)) is not None:
                alike[len(load)].append((bias, load))
        for found in alike.values():
            biases, loads_LE = [bias for bias, _ in found], torch.stack([load for _, load in found])
            signs_LE = torch.sign(loads_LE.mean(dim=1, keepdim=True) - loads_LE)
            torch._foreach_add_(biases, [*signs_LE.to(biases[0])], alpha=self._rate)

    def _show(self) -> None:
        """Record the loads of an earlier step: by now they are on the host."""
        if self._shown is None:
            return
        (step, sizes, copy), self._shown = self._shown, None
        numbers = copy.tolist()
        layers = {}
        for name, size in sizes.items():
            loads, numbers = numbers[:size], numbers[size:]
            busiest = max(loads) * len(loads) / sum(loads) if sum(loads) else math.nan  # over the mean
            layers[name] = {"tokens": sum(loads), "busiest": busiest, "entropy": _entropy(loads)}
        self._event({"event": "experts", "at_step": step, "layers": layers})

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _experts(router: nn.Module) -> int:
    weight: Any = router.weight
    return whole_shape(weight)[0]


def _entropy(loads: list[float]) -> float:
    """Return the entropy of the loads over that of equal loads: 1 if all are equal, 0 if one expert has all."""
    shares = [load / sum(loads) for load in loads if load]
    return -sum(share * math.log(share) for share in shares) / math.log(len(loads)) if shares else math.nan


def make_router_loads(
    model: nn.Module, comm: Comm, rate: float, event: Callable[[dict[str, Any]], None], *, counts: bool
) -> RouterLoads | None:
    """Return the loads of a model's routers; None if it has none with a weight for each expert."""
    found = routers_of(model)
    return RouterLoads(found, comm, rate, event, counts=counts) if found else None


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers that have a weight for each expert, by name."""
    return {name: module for name, module in find_routers(model).items() if _is_router(module)}


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and whole_shape(weight)[0] > 1
