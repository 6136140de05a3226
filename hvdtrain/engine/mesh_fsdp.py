"""The engine of ranks that divide matrices or experts; FSDP divides each part among the ranks with copies of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import IN_GROUP
from hvdtrain.comm.mesh import Mesh, comm_among, gather_hosts, make_mesh, mesh_groups
from hvdtrain.comm.solo import SoloComm
from hvdtrain.engine.divisible import norm_of_parts
from hvdtrain.engine.division import divide_model, mesh_of_parts
from hvdtrain.engine.fsdp import FsdpEngine, divide_part
from hvdtrain.engine.fsdp_checks import check_fsdp
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, make_collectives
from hvdtrain.engine.hybrid import HybridEngine, make_between_groups
from hvdtrain.engine.mesh import check_mesh
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.token_exchange import by_nccl_of_horovod
from hvdtrain.errors import ConfigError
from hvdtrain.state.divided import is_divided, name_of_copies, name_of_parts, on_stages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class MeshFsdpEngine(FsdpEngine):
    """Ranks divide the matrices or the experts of a model, and those with copies of a part divide its rows.

    Before a block runs, a rank gathers the rest of its part from the ranks with copies, and frees it afterwards. While
    it runs, ranks with other parts exchange activations with it.

    Args:
        parts: the model's parameters become those of rank 0.
        mesh: its `shard` ranks hold the whole model.
        collectives: see `FsdpEngine`.
    """

    def __init__(self, parts: EngineParts, mesh: Mesh, collectives: FsdpCollectives | None) -> None:
        self._hosts, self._everyone = gather_hosts(parts.comm), parts.comm
        self._experts: list[str] = []  # names of modules
        super().__init__(parts, mesh, collectives)
        self._ignore_views(parts.model)

    def _ignore_views(self, module: nn.Module) -> None:
        """Ignore torch's warning that a module returns a view: it stays gathered after forward. See `_copy_view`."""
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view")

    def _divide(self, parts: EngineParts, mesh: Mesh) -> None:
        """Divide each block into parts, then this rank's part among the ranks with copies of it. Collective: yes."""
        tp, experts = parts.plan.dimensions.tp, parts.plan.dimensions.experts
        names = {module: name for name, module in parts.model.named_modules()}
        copies_name, parts_name = (name(parts.plan.dimensions.pp) for name in (name_of_copies, name_of_parts))
        copies, copies_of_experts = (mesh_of_parts(parts, width)[copies_name] for width in (tp, experts))

        def divide(part: nn.Module) -> None:
            for module in _modules_of_experts(part, experts, parts_name, names) if experts != tp else ():
                module.register_forward_hook(_copy_view)
                divide_part(parts, module, copies_of_experts, casts_inputs=False)  # the block has cast tokens
                self._experts.append(names[module])
            self._divide_rows(parts, part, copies)

        self._place(parts, divide)

    def _place(self, parts: EngineParts, divide: Callable[[nn.Module], None]) -> None:
        """Give each rank its parts of the model, and divide them by `divide`. Collective: yes."""
        divide_model(parts, self._hosts, divide)

    def _divide_rows(self, parts: EngineParts, part: nn.Module, ranks: DeviceMesh) -> None:
        """Divide the rows of a block, or of what is left of the model, among the ranks with copies. Collective: yes."""
        divide_part(parts, part, ranks)

    def _comms_of_modules(self, parts: EngineParts) -> Mapping[str, Comm]:
        """Return the ranks with copies of this rank's part of each module, by its name. Collective: yes."""
        comm, dimensions = parts.comm, parts.plan.dimensions

        def among(width: int) -> Comm:
            ranks = dimensions.copies(comm.rank, comm.size, width, parts.plan.dp_shard)
            return comm_among(comm, ranks, self._hosts) if len(ranks) > 1 else SoloComm()

        others = dict.fromkeys(self._modules, among(dimensions.tp))
        return {**others, **dict.fromkeys(self._experts, among(dimensions.experts))}

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient. Collective: yes."""
        return norm_of_parts(self._owned, self._everyone, self._model)


class MeshHybridEngine(HybridEngine, MeshFsdpEngine):
    """Each group of ranks has the whole model, divided as by `MeshFsdpEngine`; our exchange sums between groups."""

    def __init__(self, parts: EngineParts, mesh: Mesh, collectives: FsdpCollectives | None) -> None:
        # Passes exchange activations and tokens by torch: see `MeshEngine`.
        self._overlaps = not by_nccl_of_horovod(parts.comm, parts.device)
        super().__init__(parts, mesh, collectives)

    def _on_sum(self, module: str, names: Sequence[str]) -> None:
        """Exchange sums that have arrived, if no rank waits for activations of others meanwhile."""
        if self._overlaps:
            super()._on_sum(module, names)


def _modules_of_experts(
    part: nn.Module, ranks: int, parts_name: str, names: Mapping[nn.Module, str]
) -> list[nn.Module]:
    """Return the modules with parameters of experts, which `ranks` ranks divide, and FSDP does not yet.

    `parts_name`: of the dimension of their mesh; `names`: of all modules of the model.

    Errors:
        ConfigError: one has other parameters, too.
    """
    found = []
    for module in part.modules():
        if any(_is_of_experts(parameter, ranks, parts_name) for parameter in module.parameters(recurse=False)):
            found.append(module)
            others = [n for n, p in module.named_parameters() if not _is_of_experts(p, ranks, parts_name)]
            if others:
                raise ConfigError(
                    f"--parallel.engine fsdp with --parallel.ep: {names[module]} has experts, and other parameters",
                    expected="a module of experts that has parameters of experts only",
                    found=others[0],
                    next_step="move the other parameters to another module, or --parallel.engine horovod",
                    everywhere=True,
                )
    return found


def _is_of_experts(parameter: nn.Parameter, ranks: int, parts_name: str) -> bool:
    by_torch = is_divided(parameter) and on_stages(parameter) is None
    mesh = cast("DTensor", parameter).device_mesh if by_torch else None
    return mesh is not None and (mesh.shape, mesh.mesh_dim_names) == ((ranks,), (parts_name,))


def _copy_view(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Return an output that is no view: an operation on one in place removes the hook that gathers for backward."""
    return output.clone() if output._is_view() else output


def make_mesh_fsdp(parts: EngineParts) -> FsdpEngine:
    """Make the engine. Collective: yes.

    Errors: those of `check_mesh` and `check_fsdp`; ConfigError: no part has copies.
    """
    _check(parts)
    kind = MeshFsdpEngine
    if parts.plan.dimensions.pp > 1:
        from hvdtrain.engine.pipeline_fsdp import PipelineFsdpEngine  # which builds on this module

        kind = PipelineFsdpEngine
    return kind(parts, make_mesh(parts.comm, None), make_collectives(parts))


def make_mesh_hybrid(parts: EngineParts) -> FsdpEngine:
    """Make the engine of groups of `--parallel.dp_shard` ranks. Collective: yes.

    Errors: those of `make_mesh_fsdp` and `make_between_groups`.
    """
    assert parts.plan.dp_shard is not None
    mesh_groups(parts.comm.size, parts.plan.dp_shard)  # checks it
    _check(parts)
    parts.plan.dimensions.check(parts.plan.dp_shard, IN_GROUP)
    return make_between_groups(parts, MeshHybridEngine, MeshFsdpEngine)


def _check(parts: EngineParts) -> None:
    check_mesh(parts)
    check_fsdp(parts)
    dimensions = parts.plan.dimensions
    together = parts.comm.size if parts.plan.dp_shard is None else parts.plan.dp_shard
    if together == dimensions.tp * dimensions.pp:
        raise ConfigError(
            f"--parallel.engine fsdp with {dimensions.options} divides parts among the ranks with copies of them",
            expected=f"more ranks, a multiple of {together}",
            found=f"{together} ranks, which hold one copy of each part",
            next_step="--parallel.engine horovod"
            + (", or start more ranks" if parts.plan.dp_shard is None else ", or a larger --parallel.dp_shard"),
            everywhere=True,
        )
