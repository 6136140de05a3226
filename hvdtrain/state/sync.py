"""Broadcast the state of one rank to all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.comm.objects import allgather_json, broadcast_json, on_rank_0
from hvdtrain.comm.solo import Finished
from hvdtrain.errors import LaunchError
from hvdtrain.state.divided import is_divided
from hvdtrain.state.pieces import DTYPES, Key, StateDict, specs
from hvdtrain.state.placeholder import Placeholder
from hvdtrain.state.train_state import NUMBERS, TrainState

_WINDOW_BYTES = 64 << 20  # bytes of tensors that are broadcast at the same time


def broadcast_state(
    state: TrainState,
    comm: Comm,
    progress: Callable[[], None] = lambda: None,
    root: int = 0,
    source: StateDict | None = None,
    *,
    placed: bool = False,
    parts: Mapping[Key, Tensor | None] | None = None,
    own: Callable[[StateDict], StateDict] = lambda received: received,
) -> None:
    """Copy parameters, buffers, optimizer state and progress from rank `root` to every rank. Collective: yes.

    Args:
        state: of this rank.
        comm: the ranks.
        progress: called after each tensor.
        root: the rank with the state.
        source: what `root` has loaded into its state, with whole tensors (default: its state, without the pieces that
            only some ranks hold). Each rank keeps what it holds of a tensor.
        placed: the parameters are equal already, because an engine has placed those of rank 0; only buffers are sent
            of the model then.
        parts: what this rank has read of `source`, of tensors that it does not hold as a whole; given on all ranks or,
            if `root` has None, by none. What all ranks have read in parts is not sent.
        own: returns what another rank loads of what it has received.

    Errors: LaunchError: on every rank, if the model of one rank has other tensors than that of `root`.
    """
    is_root = comm.rank == root
    held = state.state_dict(with_frozen=True)
    own_state = held.replicated()
    if source is not None:
        tensors = dict(source.tensors)
        if state.frozen is not None:
            frozen = {name: t for name, t in own_state.tensors["model"].items() if name in state.frozen.names}
            tensors["model"] = {**source.tensors["model"], **frozen}
        # Not what `root` has made of them.
        as_loaded = {key: source.values.get(key) for key in ("optimizer", "exchange")}
        own_state = StateDict(tensors, {**own_state.values, **as_loaded})
    here: dict[str, Tensor] = {}
    if placed and source is None:
        parameters = {name for name, _ in state.model.named_parameters(remove_duplicate=False)}
        here = {name: tensor for name, tensor in own_state.tensors["model"].items() if name in parameters}
        others = {name: tensor for name, tensor in own_state.tensors["model"].items() if name not in parameters}
        own_state = StateDict({**own_state.tensors, "model": others}, own_state.values)
    tensor_specs = {
        group: {name: [list(shape), str(dtype)] for name, (shape, dtype) in specs(entries).items()}
        for group, entries in own_state.tensors.items()
    }
    facts = {"values": dict(own_state.values), "model": _whole_model(held), "is_loaded": source is not None}
    facts["is_read"] = source is not None and parts is not None
    own_spec = {"tensors": tensor_specs, **facts}
    spec = broadcast_json(comm, own_spec, name="state/spec", root=root)
    _check_same_model(own_spec, spec, comm, root)
    received: dict[str, dict[str, Tensor]] = {group: {} for group in spec["tensors"]}
    keys = [(group, name) for group, entries in spec["tensors"].items() for name in entries]
    if spec["is_read"] and parts is not None:
        needed = torch.tensor([int(not is_root and key not in parts) for key in keys], dtype=torch.int32)
        counts = comm.allreduce(needed, name="state/needed").wait().tolist()
        keys = [key for key, count in zip(keys, counts, strict=True) if count]
        for (group, name), own_part in parts.items():
            if own_part is not None and (group, name) not in keys:
                received.setdefault(group, {})[name] = own_part
    named = (
        (f"state/{g}/{n}", own_state.tensors[g][n].detach() if is_root else empty(*spec["tensors"][g][n]))
        for g, n in keys
    )
    for (group, name), tensor in zip(keys, broadcast_all(named, comm, root), strict=True):
        progress()
        if not is_root and (part := state.held_part(group, name, tensor.shape)) is not None:
            received[group][name] = tensor if part is ... else part.of(tensor).clone()
    if not is_root:
        # An optimizer may have made state before the first step, as Adagrad does.
        groups = {"model"} if spec["is_loaded"] else {"model", "optimizer", NUMBERS}
        for group, name in held.places:
            if group in groups:
                received.setdefault(group, {}).setdefault(name, held.tensors[group][name])
        received["model"] = {**here, **received["model"]}
        state.load_state_dict(own(StateDict(received, spec["values"])))


def empty(shape: Sequence[int], dtype: str | torch.dtype) -> Tensor:
    """Return memory on the CPU for a tensor; `dtype` may be its name."""
    return torch.empty(shape, dtype=DTYPES[dtype] if isinstance(dtype, str) else dtype)


def _broadcast(tensor: Tensor, comm: Comm, name: str, root: int) -> tuple[Tensor, Handle]:
    """Start a broadcast; return the tensor on the CPU, where it arrives, and the handle.

    As bytes, because Horovod does not support all dtypes. On the CPU, because it happens only once.
    """
    there = tensor.contiguous().cpu()
    if not there.numel():
        return there, Finished(there)
    return there, comm.broadcast(there.reshape(-1).view(torch.uint8), name=name, root=root)


def broadcast_parameters(module: nn.Module, comm: Comm, prefix: str = "") -> None:
    """Copy the parameters of a module that are not divided yet from rank 0 to every rank. Collective: yes.

    A `Placeholder` becomes a parameter with memory, on the CPU; rank 0 reads its values. `prefix`: of names in the
    model. The modules have equal parameters in the same order, as `check_same` checks.

    Errors: Those of reading, on every rank.
    """
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((each, name))
    own = [(name, p) for name, p in module.named_parameters(prefix) if not is_divided(p)]
    reads = broadcast_json(comm, [isinstance(p, Placeholder) for _, p in own], name=f"parameters/{prefix}")

    def values() -> Iterator[tuple[str, Tensor]]:
        for (name, parameter), is_read in zip(own, reads, strict=True):
            if is_read:
                tensor = _read(parameter, comm, name)
            else:
                tensor = empty(parameter.shape, parameter.dtype) if comm.rank else parameter.detach()
            yield f"parameters/{name}", tensor

    for (_, parameter), there in zip(own, broadcast_all(values(), comm), strict=True):
        if isinstance(parameter, Placeholder):
            whole = nn.Parameter(there, parameter.requires_grad)
            for user, name in users[parameter]:
                setattr(user, name, whole)
        elif comm.rank:
            with torch.no_grad():
                parameter.copy_(there)


def broadcast_all(named: Iterable[tuple[str, Tensor]], comm: Comm, root: int = 0) -> Iterator[Tensor]:
    """Broadcast tensors by name, some at the same time; yield what arrives, on the CPU. Collective: yes."""
    running: deque[tuple[Tensor, Handle]] = deque()
    for name, tensor in named:
        running.append(_broadcast(tensor, comm, name, root))
        while len(running) > 1 and sum(there.nbytes for there, _ in running) > _WINDOW_BYTES:
            there, handle = running.popleft()
            handle.wait()
            yield there
    for there, handle in running:
        handle.wait()
        yield there


def _read(parameter: nn.Parameter, comm: Comm, name: str) -> Tensor:
    """Return the values on rank 0, and memory for them on others. Collective: yes."""
    tensor = torch.empty(parameter.shape, dtype=parameter.dtype) if comm.rank else parameter

    def read() -> None:
        nonlocal tensor
        assert isinstance(parameter, Placeholder) and parameter.read is not None, name
        tensor = parameter.read()

    on_rank_0(comm, read, name=f"parameters/{name}/read")
    return tensor


def _whole_model(state: StateDict) -> dict[str, Any]:
    """Return shape and dtype of the model's whole tensors; this rank may hold pieces."""
    places = {name: place for (group, name), place in state.places.items() if group == "model"}
    return {
        name: [list(places[name].shape if name in places else tensor.shape), str(tensor.dtype)]
        for name, tensor in state.tensors["model"].items()
    }


def _check_same_model(mine: dict[str, Any], wanted: dict[str, Any], comm: Comm, root: int) -> None:
    ours, theirs = mine["model"], wanted["model"]
    names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    difference = (names[0], ours.get(names[0]), theirs.get(names[0])) if names else None
    for rank, found in enumerate(allgather_json(comm, difference, name="state/same")):
        if found is not None:
            name, found_tensor, wanted_tensor = found
            raise LaunchError(
                f"the model of rank {rank} differs from that of rank {root}: {name}",
                expected=f"{wanted_tensor or 'no such tensor'} as on rank {root}",
                found=str(found_tensor or "no such tensor"),
                next_step="build the model only from the config, equal on every rank and host",
                everywhere=True,
            )
