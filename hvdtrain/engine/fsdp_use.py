"""Which parameters of a model that FSDP2 divides get a gradient in a step on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hvdtrain.engine.blocks import before_forward


class UsedParameters:
    """Names of the parameters that backward passes of a step have given a gradient on this rank.

    The sums of a module do not show it: FSDP fills in zeros for what a pass has not used. So hooks are on the whole
    parameters, which FSDP makes when it first gathers a module, and then keeps.

    Args:
        model: has the modules.
        modules: that FSDP divides, by name.
        names: of the parameters of each.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, FSDPModule], names: Mapping[str, Sequence[str]]) -> None:
        self._model = model
        self._used: set[str] = set()
        self._undo: list[Callable[[], object]] = []
        for module, divided in modules.items():
            if names[module]:
                self._watch(divided, names[module])

    def begin(self) -> None:
        """Start a step."""
        self._used.clear()

    def __contains__(self, name: str) -> bool:
        """Return whether a pass of the step has used a parameter."""
        return name in self._used

    def close(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()

    def _watch(self, divided: FSDPModule, names: Sequence[str]) -> None:
        """Watch the parameters of a module from its first forward pass on."""
        waiting = list(names)

        def begin() -> None:
            if waiting:
                divided.unshard()  # FSDP gathers a compiled module only after this; else it has
                for name in waiting:
                    whole: Any = self._model.get_parameter(name)
                    if whole.requires_grad:
                        hook = whole.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))
                        self._undo.append(hook.remove)
                waiting.clear()

        self._undo.append(before_forward(cast("nn.Module", divided), begin))
