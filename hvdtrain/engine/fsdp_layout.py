"""What FSDP2 divides among which ranks: the whole model, or what a mesh has left of it on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hvdtrain.comm.base import Comm
from hvdtrain.comm.mesh import Mesh, comm_among, gather_hosts
from hvdtrain.comm.solo import SoloComm
from hvdtrain.comm.torch_group import lasting_group
from hvdtrain.engine.blocks import blocks, outside_of_blocks
from hvdtrain.engine.division import divide_model, mesh_of_parts
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, prefetch_in_order
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.stage import Stage
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.runtime.tuning import return_freed_memory
from hvdtrain.state.divided import is_divided, name_of_copies, name_of_parts, on_stages
from hvdtrain.state.sync import broadcast_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Rows:
    """All ranks of a mesh divide the rows of each block, and of what is outside of blocks.

    Attributes:
        everyone: ranks over which the norm is summed where several hold a part; None if each part has one holder.
    """

    everyone: Comm | None = None

    def __init__(self, parts: EngineParts, mesh: Mesh) -> None:
        self._parts, self._mesh = parts, mesh

    def divide(self) -> None:
        """Divide the model. Each block has the values of rank 0. Collective: yes.

        torch moves a block to the device before it divides it. Its whole parameters are freed before the next one gets
        memory.
        """
        parts = self._parts
        ranks = DeviceMesh.from_group(lasting_group(parts.comm, self._mesh.shard_ranks), parts.device.type)
        names = {module: name for name, module in parts.model.named_modules()}
        for part in [*blocks(parts.model), parts.model]:
            broadcast_parameters(part, parts.comm, prefix=names[part])
            whole = [parameter for parameter in part.parameters() if not is_divided(parameter)]
            divide_part(parts, part, ranks)
            for parameter in whole:  # the optimizer has it until all are divided, and others may know its shape
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            return_freed_memory()

    def comms(self, modules: Iterable[str]) -> Mapping[str, Comm]:
        """Return the ranks that divide a module, by its name, where they are others than those of the mesh."""
        return {}

    def finish(self, modules: Mapping[str, FSDPModule], collectives: FsdpCollectives | None) -> None:
        """Prepare what torch has divided for passes."""


class RowsOfParts(Rows):
    """Ranks divide the matrices or the experts of a model, and those with copies of a part divide its rows.

    Before a block runs, a rank gathers the rest of its part from the ranks with copies, and frees it afterwards. While
    it runs, ranks with other parts exchange activations with it.
    """

    def __init__(self, parts: EngineParts, mesh: Mesh) -> None:
        super().__init__(parts, mesh)
        self._hosts = gather_hosts(parts.comm)
        self.everyone = parts.comm
        self._experts: list[str] = []  # names of modules

    def divide(self) -> None:
        """Divide each block into parts, then this rank's part among the ranks with copies of it. Collective: yes."""
        parts, dimensions = self._parts, self._parts.plan.dimensions
        tp, experts = dimensions.tp, dimensions.experts
        names = {module: name for name, module in parts.model.named_modules()}
        copies_name, parts_name = (name(dimensions.pp) for name in (name_of_copies, name_of_parts))
        copies, copies_of_experts = (mesh_of_parts(parts, width)[copies_name] for width in (tp, experts))

        def divide(part: nn.Module) -> None:
            for module in _modules_of_experts(part, experts, parts_name, names) if experts != tp else ():
                # No view: an operation on one in place removes the hook that gathers for backward.
                module.register_forward_hook(lambda _, given, output: output.clone() if output._is_view() else output)
                divide_part(parts, module, copies_of_experts, casts_inputs=False)  # the block has cast tokens
                self._experts.append(names[module])
            self._divide_rows(part, copies)

        self._place(divide)
        _ignore_views(parts.model)

    def _place(self, divide: Callable[[nn.Module], None]) -> None:
        """Give each rank its parts of the model, and divide them by `divide`. Collective: yes."""
        divide_model(self._parts, self._hosts, divide)

    def _divide_rows(self, part: nn.Module, ranks: DeviceMesh) -> None:
        """Divide the rows of a block, or of what is left of the model, among the ranks with copies. Collective: yes."""
        divide_part(self._parts, part, ranks)

    def comms(self, modules: Iterable[str]) -> Mapping[str, Comm]:
        """Return the ranks with copies of this rank's part of each module, by its name. Collective: yes."""
        comm, dimensions = self._parts.comm, self._parts.plan.dimensions

        def among(width: int) -> Comm:
            ranks = dimensions.copies(comm.rank, comm.size, width, self._parts.plan.dp_shard)
            return comm_among(comm, ranks, self._hosts) if len(ranks) > 1 else SoloComm()

        others = dict.fromkeys(modules, among(dimensions.tp))
        return {**others, **dict.fromkeys(self._experts, among(dimensions.experts))}


class RowsOfStages(RowsOfParts):
    """Ranks of a pipeline divide the blocks of a model; those with copies of a stage divide its rows.

    Each block, and each module with parameters outside of blocks, is gathered by itself: the model cannot be, because
    its pass ends within it.
    """

    def __init__(self, parts: EngineParts, mesh: Mesh, stage: Stage) -> None:
        self._stage = stage
        self._outside: dict[str, FSDPModule] = {}  # modules outside of blocks, by name
        self._ran: set[str] = set()  # of these, in a pass
        super().__init__(parts, mesh)

    def finish(self, modules: Mapping[str, FSDPModule], collectives: FsdpCollectives | None) -> None:
        """Let torch know one root of all that this rank gathers, and gather what is outside of blocks by itself."""
        root = _Root(modules.values())
        fully_shard(root, mesh=self._ranks)
        with torch.no_grad():
            root()  # from now on torch knows it as the root of all
        if collectives is None:  # else they have
            prefetch_in_order(modules)
        self._stage.on_start, self._stage.on_end = self._gather_outside, self._check_all_ran

    def _place(self, divide: Callable[[nn.Module], None]) -> None:
        self._stage.place(self._parts, self._hosts, divide)

    def _divide_rows(self, part: nn.Module, ranks: DeviceMesh) -> None:
        self._ranks = ranks
        parts = self._parts
        if part is not parts.model:
            if _holds(part.parameters()):
                divide_part(parts, part, ranks)
            return
        for name, module in reversed(outside_of_blocks(part).items()):  # children before the modules around them
            if _holds(module.parameters(recurse=False)):
                divide_part(parts, module, ranks, stays_gathered=True, returns_fp32=not self._stage.is_first)
                module.register_forward_hook(lambda *_, name=name: self._ran.add(name))
                _ignore_views(module)
                assert isinstance(module, FSDPModule)
                self._outside[name] = module

    def _gather_outside(self) -> None:
        """Gather what is outside of blocks, before any of it runs. Collective: yes."""
        self._ran.clear()
        for module in self._outside.values():
            module.unshard()

    def _check_all_ran(self) -> None:
        """Check that a pass has run all that is outside of blocks: ranks sum its gradients in the order of backward.

        Errors: TaskError: it has not.
        """
        if torch.is_grad_enabled() and (missing := sorted(self._outside.keys() - self._ran)):
            raise TaskError(
                f"--parallel.engine fsdp with {self._parts.plan.dimensions.options} does not support this task: a pass"
                f" has not run {', '.join(missing)}",
                expected="passes that run all modules with parameters outside of blocks",
                next_step="use them in each pass, or --parallel.engine horovod",
            )


def _ignore_views(module: nn.Module) -> None:
    """Ignore torch's warning that a module returns a view: it stays gathered after forward, or is copied."""
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view")


def divide_part(
    parts: EngineParts,
    part: nn.Module,
    mesh: DeviceMesh,
    *,
    casts_inputs: bool = True,
    stays_gathered: bool = False,
    returns_fp32: bool = False,
) -> None:
    """Divide what is not divided yet of a part of the model, or of all of it, among the ranks of a mesh.

    Args:
        parts: of the engine.
        part: the whole model, or a module in it.
        mesh: of the ranks.
        casts_inputs: whether the part gets what it is called with in the format of its parameters.
        stays_gathered: whether it does after forward, until a backward pass; the whole model does.
        returns_fp32: whether its output is fp32; that of the whole model is.
    """
    offload = CPUOffloadPolicy(pin_memory=parts.device.type == "cuda") if parts.plan.offload else OffloadPolicy()
    is_whole = part is parts.model
    formats = MixedPrecisionPolicy(cast_forward_inputs=casts_inputs)
    if parts.weights is not None:  # forward and backward get parameters in this format; sums and the loss are fp32
        output = torch.float32 if returns_fp32 or is_whole else None
        formats = MixedPrecisionPolicy(parts.weights, torch.float32, output, casts_inputs)
    reshards = not (stays_gathered or is_whole)
    fully_shard(part, mesh=mesh, reshard_after_forward=reshards, mp_policy=formats, offload_policy=offload)


def _modules_of_experts(
    part: nn.Module, ranks: int, parts_name: str, names: Mapping[nn.Module, str]
) -> list[nn.Module]:
    """Return the modules with parameters of experts, which `ranks` ranks divide, and FSDP does not yet.

    `parts_name`: of the dimension of their mesh; `names`: of all modules of the model.

    Errors: ConfigError: one has other parameters, too.
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


class _Root(nn.Module):
    """A module of all that this rank gathers. torch lets the modules within one share their streams."""

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        super().__init__()
        self.gathered = nn.ModuleList(modules)  # type: ignore[arg-type]

    def forward(self) -> None:
        """Do nothing."""


def _holds(parameters: Iterable[nn.Parameter]) -> bool:
    return any(on_stages(parameter) is None for parameter in parameters)
