"""Place a model on ranks that divide its matrices or experts: layouts of transformers, and the values of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hvdtrain.comm.solo import ImaginedComm
from hvdtrain.comm.torch_group import lasting_group
from hvdtrain.engine.blocks import blocks
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.styles import PARTIAL, styles_of
from hvdtrain.engine.token_exchange import TokenExchange, rows_among
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.tuning import return_freed_memory
from hvdtrain.state.divided import is_divided, name_of_copies, name_of_parts, take_rows
from hvdtrain.state.sync import broadcast_parameters

_GROUP_BYTES = 16 << 20
_EXCHANGE = "hvdtrain"
"""Name of our exchange of tokens in transformers' registry."""


class Layers(Protocol):
    """The layers of this rank, in a pipeline."""

    def holds(self, name: str) -> bool:
        """Return whether this rank has a parameter, or a part of it."""

    def at_both_ends(self, name: str) -> bool:
        """Return whether a parameter is on the first stage and the last one, or a module has only such parameters."""

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return the whole parameter on the device, or on ranks of other stages one without elements."""


def divide_model(
    parts: EngineParts,
    hosts: list[Any],
    divide: Callable[[nn.Module], object] | None = None,
    layers: Layers | None = None,
) -> set[str]:
    """Replace parameters of the model by this rank's parts of rank 0's values, and let modules exchange activations.

    `hosts`: of all ranks, as of `gather_hosts`. `divide` is called with each block, and then with the model, when it
    has this rank's parts, and may divide them among their copies, by torch. `layers`: of this rank, if not all. The
    model, or all of it that this rank holds, is on the device then. Returns the names of parameters that ranks have
    whole, but with a part of the gradient: the sum over ranks of `--parallel.tp` is left to the caller, without
    `divide`. Collective: yes.

    Errors: ConfigError: transformers is too old, or the model cannot be divided.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface, apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        from transformers import __version__

        raise ConfigError(
            f"{parts.plan.dimensions.options} needs a newer transformers",
            expected="transformers 5.23 or newer, which needs Python 3.11",
            found=f"transformers {__version__}",
            next_step=f"python -m pip install 'transformers>=5.23', or leave out {parts.plan.dimensions.options}",
        ) from None

    model, comm, dimensions = parts.model, parts.comm, parts.plan.dimensions
    tensor_styles, expert_styles = styles_of(model, parts.styles, dimensions)
    partial_in = tuple(f"{name}." for name, style in tensor_styles.items() if style == PARTIAL and divide is None)
    # transformers sums the gradient of all passes so far after each pass; FSDP has taken those of the others away.
    tensor_styles = {n: s for n, s in tensor_styles.items() if s != PARTIAL or divide is not None}
    if layers is not None:  # the ranks of two stages have them whole: the meshes of torch are those of one
        tensor_styles = {n: s for n, s in tensor_styles.items() if not layers.at_both_ends(n)}
    whole, ties = dict(model.named_parameters()), ties_of(model)
    for name, parameter in whole.items():  # torch divides shapes; values follow
        _set(model, name, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad))
    for name, other in ties.items():
        _set(model, name, model.get_parameter(other))

    tensors = mesh_of_parts(parts, dimensions.tp)[name_of_parts(dimensions.pp)] if dimensions.tp > 1 else None
    if tensors is not None:
        apply_tensor_parallelism(model, tensors, tensor_styles)
    if expert_styles:
        ranks = dimensions.block(comm.rank, dimensions.experts)
        experts = mesh_of_parts(parts, dimensions.experts)[name_of_parts(dimensions.pp)]
        name = "all_reduce" if dimensions.experts == dimensions.tp else "all_to_all"
        if dimensions.tp == 1:
            name = _EXCHANGE
            by_torch = divide is not None or dimensions.pp > 1
            rows = rows_among(comm, ranks, hosts, parts.device, "experts", parts.spans, by_torch=by_torch)
            EPImplementationInterface.register(name, partial(TokenExchange, rows, equal=isinstance(comm, ImaginedComm)))
        apply_expert_parallelism(model, experts, tensors, expert_styles, name)
    layout = dict(model.named_parameters())

    def take(name: str, value: Tensor) -> Tensor:
        if layers is not None and not (layers.holds(name) and is_divided(layout[name])):
            return layers.take(name, value)
        return take_rows(value, layout[name], parts.device) if is_divided(layout[name]) else value.to(parts.device)

    distribute(parts, whole, ties, take, divide)
    return {name for name, _ in model.named_parameters() if name.startswith(partial_in)}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, with the first one."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in named if first[parameter] != name}


def mesh_of_parts(parts: EngineParts, width: int) -> DeviceMesh:
    """Return the mesh of the ranks of a stage: the second dimension is that of the `width` ranks that divide something.

    With `--parallel.dp_shard`, of the ranks of a group. Collective: yes.
    """
    comm, dimensions, within = parts.comm, parts.plan.dimensions, parts.plan.dp_shard
    ranks = dimensions.copies(comm.rank, comm.size, width, within), dimensions.block(comm.rank, width)
    groups = [lasting_group(comm, each) for each in ranks]
    stage = dimensions.stage(comm.rank, comm.size) if within is None else dimensions.block(comm.rank, within)
    every = torch.tensor(stage).view(-1, width)
    names = (name_of_copies(dimensions.pp), name_of_parts(dimensions.pp))
    return DeviceMesh.from_group(groups, parts.device.type, every, mesh_dim_names=names)


def distribute(
    parts: EngineParts,
    whole: dict[str, nn.Parameter],
    ties: Mapping[str, str],
    take: Callable[[str, Tensor], Tensor],
    divide: Callable[[nn.Module], object] | None = None,
) -> None:
    """Set the parameters of the model, block by block, to what `take` returns for the values of rank 0.

    `whole`: the parameters with these values, by name; `ties`: other names of them; `divide` is called with each block,
    and then with the model. Collective: yes.
    """
    model, comm = parts.model, parts.comm
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    for part in [*blocks(model), model]:
        mine = {name: whole.pop(name) for name in list(whole) if name.startswith(prefixes[part])}
        for number, names in enumerate(_groups(mine)):
            # The values of rank 0, and no more of the whole at a time than a group.
            values = nn.ParameterList(mine.pop(name) for name in names)
            broadcast_parameters(values, comm, prefix=f"{prefixes[part]}parts{number}")
            for name, value in zip(names, values, strict=True):
                own = take(name, value.detach())
                placed = own if isinstance(own, nn.Parameter) else nn.Parameter(own, value.requires_grad)
                placed.requires_grad_(value.requires_grad)
                _set(model, name, placed)
                if divide or is_divided(own) or own.data_ptr() != value.data_ptr():
                    # The optimizer has it until all are placed.
                    value.data = value.data.new_empty(()).expand(value.shape)
            return_freed_memory()
        for name, other in ties.items():
            if name.startswith(prefixes[part]):
                _set(model, name, model.get_parameter(other))
        if divide is not None:
            divide(part)
            return_freed_memory()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(parts.device)


def _groups(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of successive parameters, of about `_GROUP_BYTES` together."""
    found: list[list[str]] = []
    left = 0
    for name, parameter in parameters.items():
        if (left := left - parameter.nbytes) < 0 or not found:
            found.append([])
            left = _GROUP_BYTES - parameter.nbytes
        found[-1].append(name)
    return found


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, parameter)
