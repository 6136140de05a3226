"""The sums of ranks that divide parameters, gradients and the optimizer's state by torch's FSDP2: ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.torch_order import naming_lost_rank
from hvdtrain.engine.base import Engine
from hvdtrain.engine.divisible import DividedSums, norm_by_row, norm_of_parts, own_rows, use_owned
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, make_collectives
from hvdtrain.engine.fsdp_layout import Rows, RowsOfParts, RowsOfStages
from hvdtrain.engine.fsdp_use import UsedParameters
from hvdtrain.engine.groups import BetweenGroups
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.refusals import elsewhere
from hvdtrain.engine.schedule import PipelineSchedule, Schedule
from hvdtrain.engine.stage import Stage
from hvdtrain.engine.sums import Loss
from hvdtrain.engine.token_exchange import by_nccl_of_horovod
from hvdtrain.errors import TaskError
from hvdtrain.state.divided import local

_OUTSIDE = "outside of blocks"
"""Name of the root in collectives."""


class FsdpSums(DividedSums):
    """Each rank holds rows of every parameter, with their gradients and optimizer state.

    The ranks gather the parameters of a block before its forward and its backward pass, and free them after it. The
    gradients of a block are summed at their owners (reduce-scatter) while backward continues, in each pass: a rank
    never holds all gradients.

    The model's parameters are DTensors from now on. The optimizer has the local rows, as plain tensors: so it also may
    be a fused one, and its state is saved as that of any divided optimizer.

    Args:
        parts: the model's parameters become those of rank 0, on the device; other ranks may have placeholders.
        mesh: its `shard` ranks divide the model, its `replicas` exchange the sums of their groups.
        layout: what is divided among which of them.
        collectives: by `mesh.shard`; None for those of torch, Gloo or NCCL.
        schedule: of the engine.
    """

    uniform_passes = True

    def __init__(
        self, parts: EngineParts, mesh: Mesh, layout: Rows, collectives: FsdpCollectives | None, schedule: Schedule
    ) -> None:
        super().__init__(parts.model, mesh.shard)
        self.compression, self._optimizer = parts.plan.compression, parts.optimizer
        self._elsewhere, self._in_order = elsewhere(parts.plan), parts.plan.bits
        self._layout, self._collectives, self.schedule = layout, collectives, schedule
        self._sums: dict[str, Tensor] = {}  # of this step's passes, by parameter
        names = {parameter: name for name, parameter in parts.parameters}
        self._trained_everywhere = [name for name, parameter in parts.parameters if parameter.requires_grad]
        layout.divide()
        self._modules = _divided_modules(parts.model)
        self._names = _names_by_module(parts.model, self._modules)
        if collectives is not None:
            collectives.use_in(self._modules, self._names, layout.comms(self._modules))
        # The first name of a tied parameter, as before.
        self._parameters = {name: p for name, p in parts.model.named_parameters() if name in set(names.values())}
        self._owned = {name: own_rows(parameter) for name, parameter in self._parameters.items()}
        self._trained = self._which_are_trained()
        use_owned(parts.optimizer, names, self._owned)
        self._optimized = sum(len(group["params"]) for group in parts.optimizer.param_groups)
        layout.finish(self._modules, collectives)
        self._used = UsedParameters(parts.model, self._modules, self._names)
        self._groups: BetweenGroups | None = None
        if mesh.replicas is not None:
            modules = cast("dict[str, nn.Module]", self._modules)
            self._groups = BetweenGroups(
                parts,
                mesh.replicas,
                modules,
                self._names,
                self._parameters,
                self._owned,
                collectives,
                schedule,
                self._take,
                self._sums,
                # Passes exchange activations and tokens by torch: see `make_mesh_engine`.
                overlaps=not (parts.plan.dimensions.divides_model and by_nccl_of_horovod(parts.comm, parts.device)),
            )
            self.residuals = self._groups

    def refresh(self) -> None:
        """Check that the parameters are those of the start. Errors: TaskError: they are not."""
        optimized = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if self._which_are_trained() != self._trained or optimized != self._optimized:
            raise TaskError(
                "parameters were added, frozen or freed during training, which --parallel.engine fsdp does not support",
                expected="the same trained parameters in every step",
                next_step=self._elsewhere,
            )

    def begin(self) -> None:  # noqa: D102
        self.complete()
        self._model.zero_grad()
        self._sums.clear()
        self._used.begin()
        if self._collectives is not None:
            self._collectives.begin(self.positions, self.schedule.left)
        if self._groups is not None:
            self._groups.begin()

    def forward(self, call: Callable[[], Loss]) -> Loss:  # noqa: D102
        if self._groups is not None:
            self._groups.forward()
        with self._named_errors():
            return call()

    def backward(self, call: Callable[[], None]) -> None:
        """Sum the gradients of a pass at their owners; in the last one, also between groups. Collective: yes."""
        if self._collectives is not None:
            self._collectives.begin_pass()
        with self._named_errors():
            if self._groups is not None:
                self._groups.backward(call)
            else:
                call()

    def finish(self) -> list[Tensor]:  # noqa: D102
        self.end_pass()
        if self._collectives is not None:
            self._collectives.finish()
        if self._groups is not None:
            return self._groups.finish()
        gradients = []
        for name, parameter in self._parameters.items():
            rows = self._owned[name].parameter
            if rows is None or not parameter.requires_grad:
                continue
            rows.grad = self._sums.pop(name) if name in self._sums else torch.zeros_like(rows)
            if (residual := self._undelivered.sums.get(name)) is not None:
                rows.grad += self._owned[name].cut(residual).to(rows)
            gradients.append(rows.grad)
        return gradients

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether this rank's passes have not used it."""
        return [name not in self._used for name in self._trained_everywhere]

    def _may_owe(self) -> bool:
        # Where ranks divide the model, too, each knows only residuals of its own part.
        return self._groups is not None or self._layout.everyone is not None or bool(self._undelivered.sums)

    def _trained_names(self) -> list[str]:
        return self._trained_everywhere

    def complete(self) -> None:
        """Free gathered parameters: a forward pass without a backward pass leaves some."""
        for module in self._modules.values():
            module.reshard()

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters in each collective by our communicators."""
        between = {} if self._groups is None else self._groups.parameter_names()
        return between if self._collectives is None else {**self._collectives.parameter_names, **between}

    def norm(self, gradients: list[Tensor]) -> Tensor:  # noqa: D102
        if self._in_order:
            return norm_by_row(self._owned, self._parameters, self._comm)
        everyone = self._layout.everyone
        return super().norm(gradients) if everyone is None else norm_of_parts(self._owned, everyone, self._model)

    def buffers(self) -> list[Tensor]:
        """Return the buckets of the exchange between groups."""
        return [] if self._groups is None else self._groups.buffers()

    def close(self) -> None:  # noqa: D102
        self._used.close()
        if self._groups is not None:
            self._groups.close()

    def end_pass(self) -> None:
        """Add this rank's rows of a pass's sums to those of the passes before."""
        if self._collectives is not None:
            self._collectives.finish_pass()
        for name in self._parameters:
            self._take(name)

    def _take(self, name: str) -> None:
        """Add this rank's rows of a sum of this pass, which has arrived if there is one."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            return
        rows, parameter.grad = local(parameter.grad), None
        if self._collectives is not None and name in self._collectives.carried:
            assert self._collectives.has_summed(rows), "torch has copied an unfinished sum"
        if name in self._sums and not self._in_order:
            rows = self._sums[name].add_(rows)
        self._sums[name] = rows

    def _which_are_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            with naming_lost_rank("a collective of FSDP"):
                yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise TaskError(
                "the model uses a parameter while the block that owns it does not run",
                expected="blocks that are called, and parameters that only their own block uses",
                found=str(error).partition("\n")[0],
                next_step=f"see the stack trace for the place; or {self._elsewhere}",
            ) from error


def _divided_modules(model: nn.Module) -> dict[str, FSDPModule]:
    """Return the modules that FSDP divides by name, the model first; their gradients are summed from now on."""
    modules = {name or _OUTSIDE: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for module in modules.values():
        # Sums, on any backend. Else it takes the mean over ranks, or multiplies by a factor, which Gloo cannot.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # in torch 2.13
            module.set_reduce_scatter_unused_params(True)
    return modules


def _names_by_module(model: nn.Module, modules: Mapping[str, FSDPModule]) -> dict[str, list[str]]:
    """Return the names of the parameters that each of `modules` divides."""
    owner: dict[nn.Parameter, str] = {}
    for module, divided in modules.items():
        owner |= dict.fromkeys(divided.parameters(), module)  # type: ignore[attr-defined]
    found: dict[str, list[str]] = {module: [] for module in modules}
    for name, parameter in model.named_parameters():
        if parameter in owner:  # else another stage of a pipeline has it
            found[owner[parameter]].append(name)
    return found


def make_fsdp(parts: EngineParts) -> Engine:
    """Make the engine. Collective: yes.

    Errors:
        ConfigError: the model cannot be divided.
        LaunchError: a group that fits on one host is on several.
    """
    plan, dimensions, comm = parts.plan, parts.plan.dimensions, parts.comm
    mesh = make_mesh(comm, plan.dp_shard)
    inside = parts if plan.dp_shard is None else parts.uncompressed(mesh.shard)
    outside = parts.uncompressed() if plan.dp_shard is not None and mesh.replicas is None else parts
    collectives = make_collectives(inside)
    schedule = Schedule()
    layout: Rows
    if dimensions.pp > 1:
        stage = Stage(parts.model, comm, dimensions, parts.device, parts.spans)
        layout, schedule = RowsOfStages(outside, mesh, stage), PipelineSchedule(stage)
    else:
        layout = RowsOfParts(outside, mesh) if dimensions.divides_model else Rows(outside, mesh)
    return Engine(parts.optimizer, FsdpSums(outside, mesh, layout, collectives, schedule), schedule)
