"""Saving the state of a compressed exchange: it changes no training, and a resume continues bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.engine.make import make_engine
from hvdtrain.engine.saved_exchange import EACH_RANK, of_rank, to_save
from hvdtrain.plan.plan import Plan
from hvdtrain.spans import Spans
from hvdtrain.state.pieces import Assembly, StateDict
from hvdtrain.state.train_state import Progress, TrainState
from tests.support.thread_comm import ThreadComm, on_ranks

STEPS = 6


class Training:
    def __init__(self, comm: ThreadComm, kind: str, options: dict[str, Any], compression: str = "int8") -> None:
        torch.manual_seed(3)
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        parameters = self.model.parameters()
        adam = kind == "adam"
        optimizer: Any = torch.optim.Adam(parameters, 0.01) if adam else torch.optim.SGD(parameters, 0.05)
        self.engine = make_engine(optimizer, self.model, comm, Plan(compression=compression, **options), Spans())
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.state = TrainState(self.model, optimizer, scaler, Progress(), self.engine)

    def step(self, number: int) -> None:
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * number + self.comm.rank))
        self.engine.begin(1)
        self.engine.backward(self.engine.forward(lambda: (self.model(x).square().mean(), 1.0))[0])
        self.engine.finish()
        self.engine.step()
        self.engine.commit(applied=True)

    def steps(self, begin: int, end: int) -> list[Tensor]:
        for number in range(begin, end):
            self.step(number)
        self.engine.complete()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def saved(self) -> StateDict:
        """Copies of what a checkpoint gets from this rank."""
        held = to_save(self.state, self.engine, self.comm)
        copies = {group: {n: t.detach().clone() for n, t in own.items()} for group, own in held.tensors.items()}
        return StateDict(copies, held.values, dict(held.places))

    def load(self, checkpoint: StateDict) -> None:
        self.state.load_state_dict(of_rank(checkpoint, self.engine, self.comm))


def _checkpoint(ranks: list[StateDict]) -> StateDict:
    """Put the pieces together, as a file has them."""
    groups: dict[str, Assembly] = {}
    for number, held in enumerate(ranks):
        for group, tensors in held.tensors.items():
            whole = groups.setdefault(group, Assembly())
            for name, tensor in tensors.items():
                if (place := held.places.get((group, name))) is not None:
                    whole.add(name, tensor, place.shape, place.offset)
                elif not number:
                    whole.add(name, tensor, tensor.shape, [0] * tensor.dim())
    for whole in groups.values():
        whole.check()
    return StateDict(groups, ranks[0].values)


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


KINDS = [
    *(({}, "adam", name) for name in ("int8", "topk:0.1", "powersgd:2")),
    ({"shard": "optimizer"}, "adam", "int8"),
    ({"shard": "gradients"}, "adam", "int8"),
    ({"shard": "gradients"}, "adam", "bf16"),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("options", "optimizer", "compression"), KINDS, ids=str)
def test_saving_changes_nothing_and_a_resume_neither(
    options: dict[str, Any], optimizer: str, compression: str, ranks: int
) -> None:
    def make(comm: ThreadComm) -> Training:
        return Training(comm, optimizer, options, compression)

    whole = on_ranks(ranks, lambda comm: make(comm).steps(0, STEPS))

    def interrupted(comm: ThreadComm) -> tuple[StateDict, list[Tensor]]:
        training = make(comm)
        training.steps(0, 3)
        return training.saved(), training.steps(3, STEPS)

    results = on_ranks(ranks, interrupted)
    assert all(_same(found, expected) for (_, found), expected in zip(results, whole, strict=True))
    checkpoint = _checkpoint([held for held, _ in results])
    assert checkpoint.values["exchange"][EACH_RANK]

    def resumed(comm: ThreadComm) -> list[Tensor]:
        training = make(comm)
        training.load(checkpoint)
        return training.steps(3, STEPS)

    assert all(_same(found, expected) for found, expected in zip(on_ranks(ranks, resumed), whole, strict=True))


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("compression", ["int8", "none"])
@pytest.mark.parametrize("saving", [2, 3, 4])
def test_the_sum_of_residuals_is_that_of_the_ranks_that_saved(saving: int, compression: str, shard: str) -> None:
    """SGD without momentum: the residuals of 4 ranks are more than the rest of its checkpoint."""
    optimizer = "adam" if saving < 4 else "sgd"

    def half(comm: ThreadComm) -> tuple[StateDict, dict[str, Tensor]]:
        training = Training(comm, optimizer, {})
        training.steps(0, 3)
        own = {key: tensor.clone() for key, tensor in training.engine.state_dict()[0].items()}
        return training.saved(), own

    results = on_ranks(saving, half)
    checkpoint = _checkpoint([held for held, _ in results])
    assert checkpoint.values["exchange"].get(EACH_RANK, False) == (saving < 4)

    def loaded(comm: ThreadComm) -> dict[str, Tensor]:
        training = Training(comm, optimizer, {"shard": shard}, compression)
        training.load(checkpoint)
        tensors, values = training.engine.state_dict()
        return {key: tensor * (values["ranks"] / comm.size) for key, tensor in tensors.items()}

    found = on_ranks(3, loaded)
    for key in results[0][1]:
        total, expected = sum(own[key] for own in found), sum(own[key] for _, own in results)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
        if (shard, compression) == ("optimizer", "none"):  # where rank 0 delivers them
            assert all(torch.equal(own[key], found[0][key]) for own in found)


def test_a_checkpoint_of_rounded_parameters_has_exact_ones_and_other_engines_take_those() -> None:
    sharded = {"shard": "optimizer"}

    def half(comm: ThreadComm) -> tuple[StateDict, dict[str, Tensor]]:
        training = Training(comm, "adam", sharded)
        training.steps(0, 3)
        held = training.saved()
        training.engine.residuals.synchronize_state()
        return held, {name: p.detach().clone() for name, p in training.model.named_parameters()}

    results = on_ranks(2, half)
    checkpoint = _checkpoint([held for held, _ in results])
    for name, exact in results[0][1].items():
        assert torch.equal(checkpoint.tensors["model"][name], exact)

    def loaded(comm: ThreadComm) -> set[str]:
        training = Training(comm, "adam", {}, "none")
        training.load(replace(checkpoint))
        assert all(torch.equal(p, results[0][1][name]) for name, p in training.model.named_parameters())
        return {key.rpartition("/")[2] for key in training.engine.state_dict()[0]}

    assert on_ranks(2, loaded) == [{"residual"}] * 2
