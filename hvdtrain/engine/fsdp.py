"""The engine that divides parameters, gradients and the optimizer's state among ranks by torch's FSDP2: ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.comm.torch_errors import is_lost_rank, lost_rank
from hvdtrain.comm.torch_group import new_group
from hvdtrain.engine.base import Loss
from hvdtrain.engine.blocks import blocks, require_blocks
from hvdtrain.engine.divisible import (
    BY_ELEMENT,
    DividedEngine,
    refuse_one_rank,
    refuse_what_cannot_be_divided,
    updates_by_element,
    use_owned,
)
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, make_collectives
from hvdtrain.engine.table import EngineParts
from hvdtrain.errors import ConfigError, HvdtrainError, TaskError
from hvdtrain.state.divided import local, place_of
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.sync import broadcast_parameters

_ELSEWHERE = "--parallel.engine horovod, with --parallel.shard gradients if memory is short"
_OUTSIDE = "outside of blocks"
"""Name of the root in collectives."""
_METHODS = ("set_force_sum_reduction_for_comms", "set_custom_all_gather", "set_custom_reduce_scatter")
"""Methods that the engine needs, and older versions of torch lack."""

_groups: list[torch.distributed.ProcessGroup] = []
"""The group of all engines of this process: torch remembers meshes by their ranks, and a mesh has its group."""


class FsdpEngine(DividedEngine):
    """Each rank holds rows of every parameter, with their gradients and optimizer state.

    The ranks gather the parameters of a block before its forward and its backward pass, and free them after it. The
    gradients of a block are summed at their owners (reduce-scatter) while backward continues, in each pass: a rank
    never holds all gradients.

    The model's parameters are DTensors from now on. The optimizer has the local rows, as plain tensors: so it also may
    be a fused one, and its state is saved as that of any divided optimizer.

    Args:
        model: its parameters become those of rank 0, on `device`.
        named: the optimizer's parameters, in the model's order.
        compression: of `collectives`.
        collectives: by `comm`; None for those of torch, Gloo or NCCL.
    """

    uniform_passes = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        named: list[tuple[str, nn.Parameter]],
        comm: Comm,
        device: torch.device,
        compression: str = "none",
        collectives: FsdpCollectives | None = None,
    ) -> None:
        super().__init__(optimizer, model, comm)
        self.compression = compression
        self._collectives = collectives
        self._sums: dict[str, Tensor] = {}  # of this step's passes, by parameter
        names = {parameter: name for name, parameter in named}
        broadcast_parameters(model, comm)
        if not _groups:
            _groups.append(new_group(comm))
        self._modules = _divide(model, _groups[0], device)
        if collectives is not None:
            collectives.use_in(self._modules)
        # The first name of a tied parameter, as before.
        self._parameters = {name: p for name, p in model.named_parameters() if name in set(names.values())}
        self._owned = {name: _own(parameter, comm) for name, parameter in self._parameters.items()}
        self._trained = self._which_are_trained()
        use_owned(optimizer, names, self._owned)

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; all ranks have the same number of passes."""
        self.complete()
        if self._which_are_trained() != self._trained:
            raise TaskError(
                "parameters were frozen or freed during training, which --parallel.engine fsdp does not support",
                expected="the same trained parameters in every step",
                next_step=_ELSEWHERE,
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
            raise _explained(error) from error

    def backward(self, loss: Tensor) -> None:
        """Sum the gradients of `loss` at their owners. Collective: yes."""
        self._end_pass()
        if self._collectives is not None:
            self._collectives.begin_pass()
        try:
            torch.autograd.backward(loss)
        except RuntimeError as error:
            raise _explained(error) from error

    def finish(self) -> list[Tensor]:
        """Wait for the sums of this rank's rows. Collective: yes."""
        self._end_pass()
        if self._collectives is not None:
            self._collectives.finish()
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
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            rows, parameter.grad = local(parameter.grad), None
            assert self._collectives is None or self._collectives.has_summed(rows), "torch has copied an unfinished sum"
            self._sums[name] = self._sums[name].add_(rows) if name in self._sums else rows

    def _which_are_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]


def _divide(model: nn.Module, group: torch.distributed.ProcessGroup, device: torch.device) -> dict[str, FSDPModule]:
    """Divide each block, and what is outside of blocks; return the divided modules by name, the root first.

    torch moves each to the device before it divides it.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    modules = {name or _OUTSIDE: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for module in modules.values():
        # Sums, on any backend. Else it takes the mean over ranks, or multiplies by a factor, which Gloo cannot.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # in torch 2.13
            module.set_reduce_scatter_unused_params(True)
    return modules


def _own(parameter: nn.Parameter, comm: Comm) -> Owned:
    """Return the rows of this rank as a parameter of its optimizer, in the same memory."""
    rows, place = local(parameter), place_of(parameter)  # type: ignore[arg-type]
    owners = tuple(range(min(comm.size, -(-len(parameter) // -(-len(parameter) // comm.size)))))
    mine = nn.Parameter(rows, requires_grad=parameter.requires_grad) if rows.numel() else None
    return Owned(mine, place, owners)


def _explained(error: RuntimeError) -> RuntimeError | HvdtrainError:
    """Return the error to raise for one of torch's."""
    if is_lost_rank(error):
        return lost_rank(error, "a collective of FSDP")
    if "mixed torch.Tensor and DTensor" in str(error):
        return TaskError(
            "the model uses a parameter while the block that owns it does not run",
            expected="blocks that are called, and parameters that only their own block uses",
            found=str(error).partition("\n")[0],
            next_step=f"see the stack trace for the place; or {_ELSEWHERE}",
        )
    return error


def make_fsdp(parts: EngineParts) -> FsdpEngine:
    """Make the engine. Collective: yes.

    Errors:
        ConfigError: there is one rank, ranks share a GPU, or model or optimizer cannot be divided.
    """
    _check_job(parts)
    refuse_what_cannot_be_divided(parts.model, parts.parameters)
    _check_model(parts.model)
    if not updates_by_element(parts.optimizer):
        raise ConfigError(
            "--parallel.engine fsdp gives each rank rows of tensors, but the optimizer may need whole tensors",
            expected=f"an optimizer of torch.optim that updates each element by itself: {', '.join(BY_ELEMENT)}",
            found=f"{type(parts.optimizer).__module__}.{type(parts.optimizer).__qualname__}",
            next_step="--parallel.engine horovod; --parallel.shard optimizer does not cut tensors for it",
        )
    collectives = make_collectives(parts)
    return FsdpEngine(
        parts.optimizer, parts.model, parts.parameters, parts.comm, parts.device, parts.compression, collectives
    )


def _check_job(parts: EngineParts) -> None:
    refuse_one_rank(parts.comm, "--parallel.engine fsdp", "model", "--parallel.engine horovod --parallel.shard none")
    if parts.bucket_mib is not None:
        raise ConfigError(
            "--parallel.bucket_mib, but --parallel.engine fsdp has no buckets: it exchanges each block by itself",
            next_step="leave it out",
        )
    if getattr(parts.comm, "through_host", False):
        raise ConfigError(
            "--parallel.engine fsdp, but ranks share a GPU",
            expected="one GPU for each rank",
            next_step="start fewer ranks, or --parallel.engine horovod",
        )
    if lacking := [name for name in _METHODS if not hasattr(FSDPModule, name)]:
        raise ConfigError(
            "--parallel.engine fsdp needs a newer torch",
            expected=f"a torch with FSDPModule.{lacking[0]}",
            found=f"torch {torch.__version__}",
            next_step="install a newer torch, or --parallel.engine horovod",
        )


def _check_model(model: nn.Module) -> None:
    found = require_blocks(model, "--parallel.engine fsdp", "divide", _ELSEWHERE)
    names = {module: name for name, module in model.named_modules()}
    inside = {module: block for block in found for module in block.modules()}
    user: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.dim():
            raise ConfigError(
                f"--parallel.engine fsdp divides parameters by rows, but {name} has no dimension",
                expected="shape (1,) or larger",
                next_step=f"make it nn.Parameter(torch.ones(1)), or {_ELSEWHERE}",
            )
        module = inside.get(model.get_submodule(name.rpartition(".")[0]), model)
        other, other_name = user.setdefault(parameter, (module, name))
        if other is not module:
            raise ConfigError(
                f"{other_name} and {name} are one parameter, in {names[other] or 'the model'} and in"
                f" {names[module] or 'the model'}",
                expected="a parameter in one block only, or only outside of blocks: each is gathered by itself",
                next_step=f"do not share it, or {_ELSEWHERE}",
            )
