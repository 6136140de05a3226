"""The engine of a pipeline in which FSDP divides each stage among the ranks with copies of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hvdtrain.comm.mesh import Mesh
from hvdtrain.engine.blocks import blocks
from hvdtrain.engine.fsdp import divide_part
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, prefetch_in_order
from hvdtrain.engine.mesh_fsdp import MeshFsdpEngine
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.pipeline import Pipelined
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.state.divided import on_stages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PipelineFsdpEngine(Pipelined, MeshFsdpEngine):
    """Ranks of a pipeline divide the blocks of a model; those with copies of a stage divide its rows.

    Each block, and each module with parameters outside of blocks, is gathered by itself: the model cannot be, because
    its pass ends within it.

    Args:
        parts: the model's parameters become those of rank 0.
        mesh, collectives: see `MeshFsdpEngine`.
    """

    def __init__(self, parts: EngineParts, mesh: Mesh, collectives: FsdpCollectives | None) -> None:
        _check(parts)
        self._options = parts.plan.dimensions.options
        self._outside: dict[str, FSDPModule] = {}  # modules outside of blocks, by name
        self._ran: set[str] = set()  # of these, in a pass
        self._make_stage(parts)
        super().__init__(parts, mesh, collectives)
        root = _Root(self._modules.values())
        fully_shard(root, mesh=self._ranks)
        with torch.no_grad():
            root()  # from now on torch knows it as the root of all
        if collectives is None:  # else they have
            prefetch_in_order(self._modules)
        self.stage.on_start, self.stage.on_end = self._gather_outside, self._check_all_ran

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; all ranks have the same number of passes."""
        super().begin(micro_batches)
        self._remaining = micro_batches

    def _place(self, parts: EngineParts, divide: Callable[[nn.Module], None]) -> None:
        self.stage.place(parts, self._hosts, divide)

    def _divide_rows(self, parts: EngineParts, part: nn.Module, ranks: DeviceMesh) -> None:
        self._ranks = ranks
        if part is not parts.model:
            if _holds(part.parameters()):
                divide_part(parts, part, ranks)
            return
        for name, module in reversed(_outside_of_blocks(part).items()):  # children before the modules around them
            if _holds(module.parameters(recurse=False)):
                divide_part(parts, module, ranks, stays_gathered=True, returns_fp32=not self.stage.is_first)
                module.register_forward_hook(partial(self._note_run, name))
                self._ignore_views(module)
                assert isinstance(module, FSDPModule)
                self._outside[name] = module

    def _note_run(self, name: str, *_: object) -> None:
        self._ran.add(name)

    def _gather_outside(self) -> None:
        """Gather what is outside of blocks, before any of it runs. Collective: yes."""
        self._ran.clear()
        for module in self._outside.values():
            module.unshard()

    def _check_all_ran(self) -> None:
        """Check that a pass has run all that is outside of blocks: ranks sum its gradients in the order of backward.

        Errors:
            TaskError: it has not.
        """
        if torch.is_grad_enabled() and (missing := sorted(self._outside.keys() - self._ran)):
            raise TaskError(
                f"--parallel.engine fsdp with {self._options} does not support this task: a pass has not run"
                f" {', '.join(missing)}",
                expected="passes that run all modules with parameters outside of blocks",
                next_step="use them in each pass, or --parallel.engine horovod",
            )


class _Root(nn.Module):
    """A module of all that this rank gathers. torch lets the modules within one share their streams."""

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        super().__init__()
        self.gathered = nn.ModuleList(modules)  # type: ignore[arg-type]

    def forward(self) -> None:
        """Do nothing."""


def _outside_of_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that are no block, and in none, by name; each before those in it."""
    within = {module for block in blocks(model) for module in block.modules()}
    return {name: module for name, module in model.named_modules() if module not in within}


def _holds(parameters: Iterable[nn.Parameter]) -> bool:
    return any(on_stages(parameter) is None for parameter in parameters)


def _check(parts: EngineParts) -> None:
    """Check that FSDP can divide the stages. Errors: ConfigError: it cannot."""
    dimensions, model = parts.plan.dimensions, parts.model
    around = {name: module for name, module in _outside_of_blocks(model).items() if blocks(module)}
    own = [f"{name}.{n}".lstrip(".") for name, m in around.items() for n, _ in m.named_parameters(recurse=False)]
    first = {name for name, _ in model.named_parameters()}
    again = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in first]
    if dimensions.virtual_stages > 1 or dimensions.zero_bubble:
        what, next_step = "--parallel.virtual_stages and --parallel.zero_bubble", "leave them out"
    elif again:
        what = f"{again[0]}, which shares a parameter (tied embeddings)"
        next_step = "untie it, by tie_word_embeddings: false in a model's config"
    elif own:
        what, next_step = f"{own[0]}, a parameter of the module around the blocks", "move it to a module of its own"
    else:
        return
    raise ConfigError(
        f"--parallel.pp {dimensions.pp} with --parallel.engine fsdp does not support {what}",
        next_step=f"{next_step}, or --parallel.engine horovod",
        everywhere=True,
    )
