"""The state of an exchange in a checkpoint: each rank's own residuals if that is not too large, else their mean.

With its own residuals each rank resumes as if it had not stopped. Their mean delivers the same sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.engine.base import Engine
from hvdtrain.exchange.active_buckets import is_residual
from hvdtrain.state.exchange_state import is_rounded, master_key, rounded_key
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
    if _fits(held, residuals, rounded, comm):
        for key in residuals:
            offset = (comm.rank, *(0,) * tensors[key].dim())
            places["exchange", key] = Place((comm.size, *tensors[key].shape), offset, (comm.rank,))
            tensors[key] = tensors[key].unsqueeze(0)
        tensors |= {rounded_key(name): model[name] for name in rounded}
        facts = {**facts, EACH_RANK: True}
    elif residuals or rounded:
        tensors = engine.synchronized_state()
    for name in rounded:  # the model in a checkpoint is exact
        del model[name]
        if (exact := tensors.pop(master_key(name), None)) is not None:
            model[name], places["model", name] = exact, places.pop(("exchange", master_key(name)))
    facts = {**facts, "inexact": False} if rounded else facts
    return StateDict(
        {**held.tensors, "model": model, **({"exchange": tensors} if tensors else {})},
        {**held.values, "exchange": facts},
        places,
    )


def _fits(held: StateDict, residuals: list[str], rounded: list[str], comm: Comm) -> bool:
    """Return whether residuals and rounded values are at most as large as the rest of the checkpoint. Collective: yes.

    False without any, and where residuals have places or are those of other ranks.
    """
    exchange, model = held.tensors.get("exchange", {}), held.tensors["model"]
    placed = [key for key in residuals if ("exchange", key) in held.places]
    own = sum(exchange[key].nbytes for key in residuals)
    pieces = sum(held.tensors[group][name].nbytes for group, name in held.places)
    numbers = torch.tensor([own, len(placed), pieces])
    extra, are_placed, rest = comm.allreduce(numbers, name="checkpoint/residuals").wait().tolist()
    extra += sum(model[name].nbytes for name in rounded)
    if comm.size == 1 or not extra or are_placed or held.values["exchange"]["ranks"] != comm.size:
        return False
    return bool(extra <= rest + held.replicated().nbytes - own)


def has_mean_residuals(saved: StateDict) -> bool:
    """Return whether a state contains the mean of several ranks' residuals, so that a resume is not bit for bit."""
    facts = saved.values.get("exchange") or {}
    return not facts.get(EACH_RANK) and any(map(is_residual, saved.tensors.get("exchange", {})))


def of_rank(saved: StateDict, engine: Engine, comm: Comm) -> StateDict:
    """Return a saved state with this rank's residuals; with their mean for another number of ranks."""
    facts = saved.values.get("exchange") or {}
    if not facts.get(EACH_RANK):
        return saved
    same, tensors = facts["ranks"] == comm.size, {}
    for key, tensor in saved.tensors["exchange"].items():
        if is_residual(key):
            tensors[key] = tensor[comm.rank] if same else tensor.mean(0)
        elif (same and engine.keeps(key)) or not is_rounded(key):
            tensors[key] = tensor
    facts = {key: value for key, value in facts.items() if key != EACH_RANK}
    return replace(saved, tensors={**saved.tensors, "exchange": tensors}, values={**saved.values, "exchange": facts})
