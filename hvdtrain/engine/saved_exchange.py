"""The state of an exchange in a checkpoint: each rank's own residuals if that is not too large, else their mean.

With its own residuals each rank resumes as if it had not stopped. Their mean delivers the same sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.engine.base import Engine
from hvdtrain.exchange.residuals import is_residual
from hvdtrain.state.exchange_state import MASTER, ROUNDED
from hvdtrain.state.pieces import Place, StateDict
from hvdtrain.state.train_state import TrainState

EACH_RANK = "each_rank"
"""Key in the saved values: whether the residuals of each rank are saved, stacked by rank."""


def to_save(state: TrainState, engine: Engine, comm: Comm) -> StateDict:
    """Return the pieces of a state for a checkpoint, without changing the state. Collective: yes.

    They are valid until the next step.
    """
    held = state.state_dict()
    facts: dict[str, Any] = held.values["exchange"]
    tensors, places = dict(held.tensors.get("exchange", {})), dict(held.places)
    model = dict(held.tensors["model"])
    rounded = sorted(model.keys() & (engine.owned() or {}).keys()) if facts.get("inexact") else []
    residuals = [key for key in tensors if is_residual(key)]
    if _fits(held, engine, residuals, rounded, comm):
        for key in residuals:
            ranks, place = engine.residual_ranks(key), places.get(("exchange", key))
            shape, offset = (place.shape, place.offset) if place else (tensors[key].shape, (0,) * tensors[key].dim())
            places["exchange", key] = Place((len(ranks), *shape), (ranks.index(comm.rank), *offset), (comm.rank,))
            tensors[key] = tensors[key].unsqueeze(0)
        tensors |= {name + ROUNDED: model[name] for name in rounded}
        facts = {**facts, EACH_RANK: True}
    elif residuals or rounded:
        tensors = engine.synchronized_state()
    for name in rounded:  # the model in a checkpoint is exact
        del model[name]
        if (exact := tensors.pop(name + MASTER, None)) is not None:
            model[name], places["model", name] = exact, places.pop(("exchange", name + MASTER))
    facts = {**facts, "inexact": False} if rounded else facts
    return StateDict(
        {**held.tensors, "model": model, **({"exchange": tensors} if tensors else {})},
        {**held.values, "exchange": facts},
        places,
    )


def _fits(held: StateDict, engine: Engine, residuals: list[str], rounded: list[str], comm: Comm) -> bool:
    """Return whether the residuals of all ranks are at most as large as the rest of the checkpoint. Collective: yes.

    False without residuals and rounded values, and where ranks have no residuals of their own.
    """
    exchange = held.tensors.get("exchange", {})
    own = sum(exchange[key].nbytes for key in residuals)
    equal = sum(not engine.residual_ranks(key) for key in residuals)
    others = [each for each in held.pieces() if each.group != "exchange" or not is_residual(each.name)]
    pieces = sum(piece.tensor.nbytes for piece in others)
    numbers = torch.tensor([own, equal, pieces])
    every, are_equal, rest = comm.allreduce(numbers, name="checkpoint/residuals").wait().tolist()
    whole = sum(t.nbytes for group, ts in held.replicated().tensors.items() if group != "exchange" for t in ts.values())
    return bool(comm.size > 1 and (every or rounded) and not are_equal and every <= rest + whole)


def has_mean_residuals(saved: StateDict) -> bool:
    """Return whether a state contains the mean of several ranks' residuals, so that a resume is not bit for bit."""
    facts = saved.values.get("exchange") or {}
    return not facts.get(EACH_RANK) and any(map(is_residual, saved.tensors.get("exchange", {})))


def of_rank(saved: StateDict, engine: Engine, comm: Comm) -> StateDict:
    """Return a saved state with this rank's residuals; with their mean for another number of ranks."""
    facts = saved.values.get("exchange") or {}
    if not facts.get(EACH_RANK):
        return saved
    tensors: dict[str, Tensor] = {}
    for key, tensor in saved.tensors["exchange"].items():
        if is_residual(key):
            ranks = engine.residual_ranks(key)
            tensors[key] = tensor[ranks.index(comm.rank)] if len(ranks) == len(tensor) else tensor.mean(0)
        elif not key.endswith(ROUNDED) or (facts["ranks"] == comm.size and engine.keeps(key)):
            tensors[key] = tensor
    facts = {key: value for key, value in facts.items() if key != EACH_RANK}
    return replace(saved, tensors={**saved.tensors, "exchange": tensors}, values={**saved.values, "exchange": facts})
