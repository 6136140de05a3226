"""The engine that divides parameters, gradients and the optimizer's state among ranks by torch's FSDP2: ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hvdtrain.comm.base import Comm
from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.torch_errors import is_lost_rank, lost_rank
from hvdtrain.comm.torch_group import lasting_group
from hvdtrain.engine.base import Loss
from hvdtrain.engine.blocks import blocks
from hvdtrain.engine.divisible import DividedEngine, own_rows, use_owned
from hvdtrain.engine.fsdp_checks import check_fsdp, elsewhere
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, make_collectives
from hvdtrain.engine.parts import EngineParts
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.runtime.memory import return_freed_memory
from hvdtrain.state.divided import is_divided, local
from hvdtrain.state.sync import broadcast_parameters

_OUTSIDE = "outside of blocks"
"""Name of the root in collectives."""


class FsdpEngine(DividedEngine):
    """Each rank holds rows of every parameter, with their gradients and optimizer state.

    The ranks gather the parameters of a block before its forward and its backward pass, and free them after it. The
    gradients of a block are summed at their owners (reduce-scatter) while backward continues, in each pass: a rank
    never holds all gradients.

    The model's parameters are DTensors from now on. The optimizer has the local rows, as plain tensors: so it also may
    be a fused one, and its state is saved as that of any divided optimizer.

    Args:
        parts: the model's parameters become those of rank 0, on the device; other ranks may have placeholders.
        mesh: its `shard` ranks divide the model.
        collectives: by `mesh.shard`; None for those of torch, Gloo or NCCL.
    """

    uniform_passes = True

    def __init__(self, parts: EngineParts, mesh: Mesh, collectives: FsdpCollectives | None = None) -> None:
        super().__init__(parts.optimizer, parts.model, mesh.shard)
        self.compression, self._elsewhere = parts.plan.compression, elsewhere(parts)
        self._collectives = collectives
        self._sums: dict[str, Tensor] = {}  # of this step's passes, by parameter
        names = {parameter: name for name, parameter in parts.parameters}
        self._divide(parts, mesh)
        self._modules = _divided_modules(parts.model)
        self._names = _names_by_module(parts.model, self._modules)
        if collectives is not None:
            collectives.use_in(self._modules, self._names, self._comms_of_modules(parts))
        # The first name of a tied parameter, as before.
        self._parameters = {name: p for name, p in parts.model.named_parameters() if name in set(names.values())}
        self._owned = {name: own_rows(parameter) for name, parameter in self._parameters.items()}
        self._trained = self._which_are_trained()
        use_owned(parts.optimizer, names, self._owned)
        self._optimized = sum(len(group["params"]) for group in parts.optimizer.param_groups)

    def _divide(self, parts: EngineParts, mesh: Mesh) -> None:
        """Divide the model among the ranks of the mesh. Each block has the values of rank 0. Collective: yes.

        torch moves a block to the device before it divides it. Its whole parameters are freed before the next one gets
        memory.
        """
        ranks = DeviceMesh.from_group(lasting_group(parts.comm, mesh.shard_ranks), parts.device.type)
        names = {module: name for name, module in parts.model.named_modules()}
        for part in [*blocks(parts.model), parts.model]:
            broadcast_parameters(part, parts.comm, prefix=names[part])
            whole = [parameter for parameter in part.parameters() if not is_divided(parameter)]
            divide_part(parts, part, ranks)
            for parameter in whole:  # the optimizer has it until all are divided, and others may know its shape
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            return_freed_memory()

    def _comms_of_modules(self, parts: EngineParts) -> Mapping[str, Comm]:
        """Return the ranks that divide a module, by its name, where they are others than those of the mesh."""
        return {}

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; all ranks have the same number of passes."""
        self.complete()
        optimized = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if self._which_are_trained() != self._trained or optimized != self._optimized:
            raise TaskError(
                "parameters were added, frozen or freed during training, which --parallel.engine fsdp does not support",
                expected="the same trained parameters in every step",
                next_step=self._elsewhere,
            )
        self._model.zero_grad()
        self.optimizer.zero_grad()
        self._sums.clear()
        if self._collectives is not None:
            self._collectives.begin()

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of a step. Collective: yes."""
        try:
            return call()
        except RuntimeError as error:
            raise self._explained(error) from error

    def backward(self, loss: Tensor) -> None:
        """Sum the gradients of `loss` at their owners. Collective: yes."""
        self._pass_back(partial(torch.autograd.backward, loss))

    def _pass_back(self, call: Callable[[], None]) -> None:
        self._end_pass()
        if self._collectives is not None:
            self._collectives.begin_pass()
        try:
            call()
        except RuntimeError as error:
            raise self._explained(error) from error

    def finish(self) -> list[Tensor]:
        """Wait for the sums of this rank's rows. Collective: yes."""
        self._end_pass()
        if self._collectives is not None:
            self._collectives.finish()
        return self._deliver()

    def _deliver(self) -> list[Tensor]:
        """Give the sums of the passes to the optimizer, and return them."""
        gradients = []
        for name, parameter in self._parameters.items():
            rows = self._owned[name].parameter
            if rows is None or not parameter.requires_grad:
                continue
            rows.grad = self._sums.pop(name) if name in self._sums else torch.zeros_like(rows)
            if (residual := self._residuals.get(name)) is not None:
                rows.grad += self._owned[name].cut(residual).to(rows)
            gradients.append(rows.grad)
        return gradients

    def complete(self) -> None:
        """Free gathered parameters: a forward pass without a backward pass leaves some."""
        for module in self._modules.values():
            module.reshard()

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters in each collective by our communicator."""
        return {} if self._collectives is None else self._collectives.parameter_names

    def _end_pass(self) -> None:
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
        self._sums[name] = self._sums[name].add_(rows) if name in self._sums else rows

    def _which_are_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    def _explained(self, error: RuntimeError) -> RuntimeError | HvdtrainError:
        """Return the error to raise for one of torch's."""
        if is_lost_rank(error):
            return lost_rank(error, "a collective of FSDP")
        if "mixed torch.Tensor and DTensor" in str(error):
            return TaskError(
                "the model uses a parameter while the block that owns it does not run",
                expected="blocks that are called, and parameters that only their own block uses",
                found=str(error).partition("\n")[0],
                next_step=f"see the stack trace for the place; or {self._elsewhere}",
            )
        return error


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
    formats = replace(_formats(parts.weights, returns_fp32=returns_fp32 or is_whole), cast_forward_inputs=casts_inputs)
    reshards = not (stays_gathered or is_whole)
    fully_shard(part, mesh=mesh, reshard_after_forward=reshards, mp_policy=formats, offload_policy=offload)


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


def _formats(weights: torch.dtype | None, *, returns_fp32: bool) -> MixedPrecisionPolicy:
    """Return the formats of a module: forward and backward get parameters as `weights`; sums and the loss are fp32."""
    if weights is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(weights, torch.float32, torch.float32 if returns_fp32 else None)


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


def make_fsdp(parts: EngineParts) -> FsdpEngine:
    """Make the engine. Collective: yes.

    Errors: those of `check_fsdp`.
    """
    check_fsdp(parts)
    return FsdpEngine(parts, make_mesh(parts.comm, None), make_collectives(parts))
