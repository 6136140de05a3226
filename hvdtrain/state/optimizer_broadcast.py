"""Broadcast the options and the state of an optimizer from one rank to all.

They are a tree of tensors and plain values: torch's pytree takes it apart and writes its form as JSON. Horovod's
`broadcast_optimizer_state` makes state on ranks without one by a step of zero gradients. Weight decay and momentum make
it a real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import TaskError
from hvdtrain.state.sync import broadcast_all, empty
from hvdtrain.state.train_state import stored_as

_SENT = (Tensor, int, float, str, bool, type(None))  # types of values in an optimizer that are sent


@torch.no_grad()
def broadcast_optimizer(optimizer: Optimizer, comm: Comm, root: int = 0) -> None:
    """Copy the options of an optimizer's groups and its state from rank `root` to every rank. Collective: yes.

    Parameters stay as they are. A parameter without state on `root` has none anywhere. Tensors that a rank has already,
    of the same shape and type, are changed in place.

    Errors: TaskError: on every rank: a rank has other groups of parameters, or `root` has a value that cannot be sent.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "state": {i: dict(optimizer.state[p]) for i, p in enumerate(parameters) if p in optimizer.state},
    }
    leaves, form = tree_flatten(held)
    shapes = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    unknown = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _SENT)})
    _check_optimizers(allgather_json(comm, [shapes, unknown], name="optimizer/groups"), root)
    is_root = comm.rank == root
    own = [treespec_dumps(form), [_described(leaf) for leaf in leaves]] if is_root else None
    text, described = broadcast_json(comm, own, name="optimizer/form", root=root)
    if is_root:
        parts = (part for leaf in leaves for part in _parts(leaf))
    else:
        parts = (empty(*part) for each in described if isinstance(each, dict) for part in each["parts"])
    arrived = broadcast_all(((f"optimizer/{n}", part) for n, part in enumerate(parts)), comm, root)
    if is_root:
        deque(arrived, maxlen=0)
        return
    form = treespec_loads(text)
    numbers = tree_unflatten(list(range(len(described))), form)
    places: dict[int, tuple[Any, Any]] = {}
    for group, options in zip(optimizer.param_groups, numbers["groups"], strict=True):
        parameter = next(iter(group["params"]), None)
        places |= {leaf: (parameter, group.get(name)) for name, tree in options.items() for leaf in tree_leaves(tree)}
    for number, slots in numbers["state"].items():
        parameter, before = parameters[number], optimizer.state.get(parameters[number], {})
        places |= {leaf: (parameter, before.get(name)) for name, tree in slots.items() for leaf in tree_leaves(tree)}
    tree = tree_unflatten([_placed(each, arrived, *places[leaf]) for leaf, each in enumerate(described)], form)
    for group, options in zip(optimizer.param_groups, tree["groups"], strict=True):
        group.update(options)
    for number, parameter in enumerate(parameters):
        optimizer.state.pop(parameter, None)
        if number in tree["state"]:
            optimizer.state[parameter] = tree["state"][number]


def _check_optimizers(found: Sequence[tuple[Any, list[str]]], root: int) -> None:
    """Check the shapes of parameters by group, of every rank, and that the types of `root`'s values can be sent."""
    expected, unknown = found[root]
    for rank, (shapes, _) in enumerate(found):
        if shapes != expected:
            raise TaskError(
                "the ranks' optimizers have other parameters",
                expected=f"groups of {', '.join(str(len(group)) for group in expected)} parameters, as on rank {root}",
                found=f"groups of {', '.join(str(len(group)) for group in shapes)} on rank {rank}, or other shapes",
                next_step="make the same model and optimizer on every rank before the broadcast",
                everywhere=True,
            )
    if unknown:
        raise TaskError(
            "the state or the options of the optimizer have values that cannot be sent",
            expected="tensors, numbers, strings, and lists, tuples and dicts of them",
            found=", ".join(unknown),
            next_step="load the state on every rank instead of broadcasting it",
            everywhere=True,
        )


def _described(leaf: Any) -> Any:
    """Return a JSON value that says what a leaf is; a plain value is in a list of one."""
    if not isinstance(leaf, Tensor):
        return [leaf]
    parts = [[list(part.shape), str(part.dtype)] for part in _parts(leaf)]
    return {"shape": list(leaf.shape), "sparse": leaf.is_sparse, "on_host": leaf.device.type == "cpu", "parts": parts}


def _parts(leaf: Any) -> list[Tensor]:
    """Return the dense tensors that a leaf consists of."""
    if not isinstance(leaf, Tensor):
        return []
    leaf = leaf.detach()
    return [(whole := leaf.coalesce()).indices(), whole.values()] if leaf.is_sparse else [leaf]


def _placed(described: Any, arrived: Iterator[Tensor], parameter: nn.Parameter | None, held: Any) -> Any:
    """Return a leaf of a parameter; a tensor that arrives is copied into the one that is `held`, if it fits."""
    if isinstance(described, list):
        return described[0]
    tensor = next(arrived)
    if described["sparse"]:
        tensor = torch.sparse_coo_tensor(tensor, next(arrived), described["shape"], check_invariants=True).coalesce()
    elif isinstance(held, Tensor) and (held.shape, held.dtype) == (tensor.shape, tensor.dtype) and not held.is_sparse:
        return held.copy_(tensor)
    if parameter is not None and not described["on_host"]:
        tensor = tensor.to(parameter.device)
    return tensor if parameter is None or tensor.is_sparse else stored_as(parameter, tensor)
