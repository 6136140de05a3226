"""What ranks, devices, model and optimizer of a plan do not support: a function for each part, before training.

What depends on options alone is in `plan.refusals`. What only the division itself finds is refused there: a plan of
matrices or experts (`engine.styles`), the stages of parameters (`engine.stages`), ranks that own nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hvdtrain.comm.dimensions import IN_GROUP
from hvdtrain.comm.mesh import mesh_groups
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.engine.blocks import blocks, outside_of_blocks, require_blocks, stage_blocks
from hvdtrain.engine.divisible import BY_ELEMENT, sparse_gradients, updates_by_element, whole_parameters
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.sequence import dropout_of
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.state.placeholder import Placeholder


def refuse(parts: EngineParts) -> None:
    """Check that an engine can be made. Collective: yes. Errors: ConfigError: it cannot."""
    for part in PARTS:
        part(parts)


def elsewhere(plan: Plan) -> str:
    """Return options for what FSDP does not support."""
    divided = plan.dimensions.divides_model
    return "--parallel.engine horovod" + ("" if divided else ", with --parallel.shard gradients if memory is short")


def _ranks(parts: EngineParts) -> None:
    plan, dimensions, size = parts.plan, parts.plan.dimensions, parts.comm.size
    dimensions.check(size)
    if size == 1 and plan.shard != "none" and not plan.elastic:
        is_fsdp = plan.engine == "fsdp"
        options = "--parallel.engine fsdp" if is_fsdp else f"--parallel.shard {plan.shard}"
        raise ConfigError(
            f"{options} divides the {'model' if is_fsdp else 'optimizer'} among ranks",
            expected="2 or more ranks",
            found="1 rank",
            next_step=f"{'--parallel.engine horovod ' if is_fsdp else ''}--parallel.shard none: it resumes checkpoints"
            " of divided runs, too",
        )
    mesh_groups(size, plan.dp_shard)  # checks it
    if plan.engine != "fsdp" or not dimensions.divides_model:
        return
    together = size if plan.dp_shard is None else plan.dp_shard
    if together == dimensions.tp * dimensions.pp:
        raise ConfigError(
            f"--parallel.engine fsdp with {dimensions.options} divides parts among the ranks with copies of them",
            expected=f"more ranks, a multiple of {together}",
            found=f"{together} ranks, which hold one copy of each part",
            next_step="--parallel.engine horovod"
            + (", or start more ranks" if plan.dp_shard is None else ", or a larger --parallel.dp_shard"),
            everywhere=True,
        )
    if plan.dp_shard is not None:
        dimensions.check(plan.dp_shard, IN_GROUP)


_METHODS = ("set_force_sum_reduction_for_comms", "set_custom_all_gather", "set_custom_reduce_scatter")
"""Methods that FSDP needs, and older versions of torch lack."""


def _devices(parts: EngineParts) -> None:
    plan, comm = parts.plan, parts.comm
    if getattr(comm, "through_host", False) and plan.dimensions.experts > 1:
        raise ConfigError(
            f"{plan.dimensions.options}, but ranks share a GPU",
            expected="one GPU for each rank: Gloo of torch 2.11 crashes in gathers of tensors on GPUs",
            next_step="start fewer ranks, or leave it out",
        )
    if plan.engine != "fsdp":
        return
    from torch.distributed.fsdp import FSDPModule  # hundreds of modules

    from hvdtrain.comm.torch_group import TorchComm

    if lacking := [name for name in _METHODS if not hasattr(FSDPModule, name)]:
        raise ConfigError(
            "--parallel.engine fsdp needs a newer torch",
            expected=f"a torch with FSDPModule.{lacking[0]}",
            found=f"torch {torch.__version__}",
            next_step="install a newer torch, or --parallel.engine horovod",
        )
    has_groups = plan.dp_shard is not None and plan.dp_shard < comm.size
    if has_groups and plan.compression != "none" and isinstance(comm, TorchComm) and parts.device.type == "cuda":
        raise ConfigError(
            f"--parallel.dp_shard with --parallel.compression {plan.compression}, but torchrun started the ranks",
            expected="one of Horovod's launchers: on GPUs, NCCL needs one order of all collectives",
            next_step="hvdtrain launch, mpirun or srun; or leave out --parallel.compression",
        )


def _parameters(parts: EngineParts) -> None:
    """Refuse parameters in the same memory, and gradients that are sparse or complex, where ranks divide any."""
    plan = parts.plan
    if plan.shard != "none" or plan.dimensions.divides_model:
        without = "do not divide the optimizer (shard: none)"
        if plan.engine == "fsdp":
            without = "--parallel.engine horovod --parallel.shard none"
        elif plan.dimensions.divides_model:
            without = f"leave out {plan.dimensions.options}"
        # Other ranks may have placeholders, which share no memory.
        on_rank_0(parts.comm, partial(_refuse_what_has_no_parts, parts, without), name="divisible")


def _refuse_what_has_no_parts(parts: EngineParts, without: str) -> None:
    by_address: dict[int, str] = {}
    for name, parameter in parts.parameters:
        if isinstance(parameter, Placeholder):
            continue
        address = parameter.data_ptr() or id(parameter)  # 0 if it has no memory
        if parameter.numel() and (other := by_address.setdefault(address, name)) != name:
            raise ConfigError(
                f"{other} and {name} are two parameters in the same memory",
                expected="one parameter under two names",
                next_step=f"assign the same nn.Parameter to both modules, or {without}",
            )
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, and cannot be divided among ranks",
                expected="real parameters",
                found=str(parameter.dtype),
                next_step=f"make it real, with a last dimension of 2, and use torch.view_as_complex; or {without}",
            )
    for name in sparse_gradients(parts.model).values():
        raise ConfigError(
            f"{name} makes sparse gradients, which cannot be divided among ranks",
            expected="nn.Embedding(sparse=False)",
            next_step=f"use dense gradients, or {without}",
        )


def _rows(parts: EngineParts) -> None:
    """Refuse parameters that FSDP cannot divide by rows, or gather by blocks."""
    if parts.plan.engine != "fsdp":
        return
    model, weights, otherwise = parts.model, parts.weights, elsewhere(parts.plan)
    found = require_blocks(model, "--parallel.engine fsdp", "divide", otherwise)
    names = {module: name for name, module in model.named_modules()}
    inside = {module: block for block in found for module in block.modules()}
    user: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    first: dict[nn.Module, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_empty = not parameter.numel() and parameter.requires_grad
        for wrong, what, expected, next_step in (
            (not parameter.dim(), "has no dimension", "shape (1,) or larger", "make it nn.Parameter(torch.ones(1))"),
            (is_empty, "has no elements", "parameters to train with elements", "freeze or delete it"),
            (
                not parameter.is_contiguous(),
                "is not contiguous",
                "a contiguous parameter: not transposed, and not in the memory format channels_last",
                "make it contiguous",
            ),
        ):
            if wrong:
                raise ConfigError(
                    f"--parallel.engine fsdp divides parameters by rows, but {name} {what}",
                    expected=expected,
                    found=f"shape {tuple(parameter.shape)}",
                    next_step=f"{next_step}, or {otherwise}",
                )
        module = inside.get(model.get_submodule(name.rpartition(".")[0]), model)
        other, other_name = user.setdefault(parameter, (module, name))
        if other is not module:
            raise ConfigError(
                f"{other_name} and {name} are one parameter, in {names[other] or 'the model'} and in"
                f" {names[module] or 'the model'}",
                expected="a parameter in one block only, or only outside of blocks: each is gathered by itself",
                next_step=f"do not share it, or {otherwise}",
            )
        if not parameter.requires_grad:
            continue
        dtype = first.setdefault(module, parameter).dtype if weights is None else torch.float32
        if parameter.dtype != dtype:
            raise ConfigError(
                f"--parallel.engine fsdp sums the gradients of {names[module] or 'all parameters outside of blocks'} in"
                f" one format, but {name} has another",
                expected=f"{dtype}, as " + ("of the other parameters" if weights is None else "bf16-weights needs it"),
                found=str(parameter.dtype),
                next_step=f"cast or freeze it, or {otherwise}",
            )


def _optimizer(parts: EngineParts) -> None:
    """Refuse optimizers that may need whole tensors, where ranks have parts; experts are whole, if tp divides none."""
    plan, dimensions, optimizer = parts.plan, parts.plan.dimensions, parts.optimizer
    if not (plan.engine == "fsdp" or dimensions.experts > 1) or updates_by_element(optimizer):
        return
    if plan.engine == "fsdp":
        divides, more = "--parallel.engine fsdp gives each rank rows of tensors", ""
        otherwise = (
            "take one of these"
            if dimensions.divides_model
            else "--parallel.engine horovod, where --parallel.shard optimizer does not cut tensors for it"
        )
    else:
        parameters = [parameter for _, parameter in parts.parameters]
        whole = zip(parameters, whole_parameters(optimizer, parameters), strict=True)
        if dimensions.tp == 1 and not any(each for parameter, each in whole if parameter.dim() > 2):
            return
        divides, more = f"{dimensions.options} gives each rank parts of matrices", "; for --parallel.ep also muon"
        otherwise = f"another --optimizer.name, or leave out {dimensions.options}"
    raise ConfigError(
        f"{divides}, but the optimizer may need whole tensors",
        expected=f"an optimizer of torch.optim that updates each element by itself: {', '.join(BY_ELEMENT)}{more}",
        found=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        next_step=f"set updates_by_element = True in the class of your own optimizer that does; otherwise {otherwise}",
    )


def _sequences(parts: EngineParts) -> None:
    """Refuse dropout: ranks that divide a pass draw other random numbers than one rank."""
    if parts.plan.dimensions.cp > 1 and (found := dropout_of(parts.model)):
        name, value = next(iter(found.items()))
        raise ConfigError(
            f"--parallel.cp does not support dropout, which {name} sets",
            expected="no dropout: each part would drop others, so the loss would depend on the number of ranks",
            found=f"a dropout of {value:g}",
            next_step="a config of the model without it (that of attention weights: --model.dropout 0), or leave out"
            " --parallel.cp",
            everywhere=True,
        )


def _stages(parts: EngineParts) -> None:
    """Refuse what stages would not compute as one rank does."""
    model, dimensions = parts.model, parts.plan.dimensions
    if dimensions.pp == 1:
        return
    option, leave = dimensions.options, "leave out --parallel.pp"
    require_blocks(model, option, "divide", leave)
    count, chunks = len(stage_blocks(model)), dimensions.virtual_stages
    if count < dimensions.pp * chunks:
        raise ConfigError(
            f"{option}, but the model has {count} block(s)",
            expected="at most as many stages as blocks, virtual ones included",
            next_step=f"--parallel.pp {count} or fewer"
            if chunks == 1
            else f"fewer of them, or --parallel.virtual_stages {max(1, count // dimensions.pp)}",
            everywhere=True,
        )
    wrong = [
        (f"skipping blocks at random, which {name} sets", f"a probability of 0, not {value:g}", leave)
        for name, value in dropout_of(model).items()
        if "layerdrop" in name
    ]
    wrong += [
        (f"{name}, a parameter without dimensions", "one dimension or more, such as torch.ones(1)", leave)
        for name, parameter in model.named_parameters()
        if not parameter.dim()
    ]
    wrong += [
        (f"running statistics, which {name} has", "norms of each sample, such as nn.LayerNorm", leave)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    ]
    if parts.plan.engine == "fsdp":
        option += " with --parallel.engine fsdp"
        wrong += [
            (
                f"{f'{around}.{name}'.lstrip('.')}, a parameter of the module around the blocks",
                "parameters of blocks, and of modules without blocks",
                "move it to a module of its own, or --parallel.engine horovod",
            )
            for around, module in outside_of_blocks(model).items()
            if blocks(module)
            for name, _ in module.named_parameters(recurse=False)
        ]
    for what, expected, next_step in wrong:
        raise ConfigError(f"{option} does not support {what}", expected=expected, next_step=next_step, everywhere=True)


PARTS = (_ranks, _devices, _parameters, _rows, _optimizer, _sequences, _stages)
"""Each refuses what its part of a plan cannot have."""
