"""What scripts of Horovod's users also do: change parameters on the way, leave steps out, load a state on one rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError, TaskError


@pytest.fixture(scope="module", params=[None], ids=["mpi"])
def hvd(job: Comm) -> Any:
    """Ours; only where Horovod runs."""
    if job.size == 1:
        pytest.skip("needs a Horovod job: mpirun -np 2")
    import hvdtrain.torch as ours

    ours.init()
    return ours


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss: Tensor = model(x).pow(2).mean()
    return loss


def _equal(model: nn.Module, job: Comm) -> bool:
    rows = [job.allgather(p.detach().reshape(1, -1), name="same").wait() for p in model.parameters()]
    return all(torch.equal(row, every[0]) for every in rows for row in every)


def test_a_group_that_is_added_is_exchanged_at_once(hvd: Any, job: Comm) -> None:
    model, extra = _model(), nn.Linear(6, 1)
    hvd.broadcast_parameters(extra.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    optimizer.add_param_group({"params": list(extra.parameters())})
    (_loss(model, job.rank, 0) + _loss(extra, job.rank, 0)).backward()
    optimizer.step()
    assert _equal(extra, job)
    assert _equal(model, job)


@pytest.mark.parametrize("compression", ["none", "powersgd:1"])
def test_parameters_freed_between_steps_are_exchanged_at_once(hvd: Any, job: Comm, compression: str) -> None:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), compression=compression)
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        _loss(model, job.rank, step).backward()
        optimizer.step()
        assert _equal(model, job), step


def test_a_rank_may_idle_after_a_step_that_was_left_out(hvd: Any, job: Comm) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or job.rank == 0:
            _loss(model, job.rank, step).backward()
        optimizer.synchronize()
        if step != 1:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert _equal(model, job)


def test_a_state_loaded_on_one_rank_leaves_the_buckets_agreed(hvd: Any, job: Comm) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    for step in range(4):
        if step == 2:
            if job.rank == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.zero_grad()
        _loss(model, job.rank, step).backward()
        optimizer.step()
    assert _equal(model, job)


def test_a_state_that_one_rank_has_reaches_those_without(hvd: Any, job: Comm) -> None:
    """They make room for it by a step of their own, in which the one that has it takes no part."""
    model, before = _model(), _model()
    plain = _sgd(before)
    _loss(before, 0, 0).backward()
    plain.step()
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    if job.rank == 0:
        optimizer.load_state_dict(plain.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], plain.state[q]["momentum_buffer"])
    optimizer.zero_grad()
    _loss(model, job.rank, 1).backward()
    optimizer.step()
    assert _equal(model, job)


def test_gradients_on_their_way_are_not_cleared(hvd: Any, job: Comm) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, job.rank, step).backward()
        with pytest.raises(TaskError, match="on their way"):
            optimizer.zero_grad()
        optimizer.step()
    assert _equal(model, job)


def test_a_scaler_does_not_unscale_what_is_on_its_way(hvd: Any, job: Comm) -> None:
    """Without `synchronize` before it: it says so, where the optimizer would follow gradients times the scale."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), compression="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):  # the first exchanges after backward
        optimizer.zero_grad()
        scaler.scale(_loss(model, job.rank, step)).backward()
        if step == 0:
            optimizer.step()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
    optimizer.synchronize()


def test_passes_are_counted_from_a_clearing_on(hvd: Any, job: Comm) -> None:
    model, other = _model(), _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), backward_passes_per_step=2)
    reference = hvd.DistributedOptimizer(_sgd(other), backward_passes_per_step=2)
    for step in range(3):
        _loss(model, job.rank, 100 + step).backward()
        for m, o in ((model, optimizer), (other, reference)):
            o.zero_grad()
            for part in range(2):
                _loss(m, job.rank, 2 * step + part).backward()
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_hooks_run_once_a_step_also_after_a_state_was_loaded(hvd: Any, job: Comm) -> None:
    model, called = _model(), [0]
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    optimizer.register_step_pre_hook(lambda *_: called.__setitem__(0, called[0] + 1))
    for step in range(3):
        _loss(model, job.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert called == [3]


def test_a_line_search_decides_alike_on_all_ranks(hvd: Any, job: Comm) -> None:
    """The closure returns this rank's loss."""
    model, returned = _model(), []
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, job.rank, 0)
        loss.backward()
        returned.append(loss.item())
        return loss

    mean = optimizer.step(closure)
    everyone = job.allgather(torch.tensor(returned[:1]), name="first").wait()
    torch.testing.assert_close(mean, everyone.mean(), check_dtype=False)
    assert _equal(model, job)


def test_ranks_of_a_set_name_their_exchange_apart_from_the_others(hvd: Any, job: Comm) -> None:
    alone = hvd.add_process_set([0])
    try:
        first = _model()
        if job.rank == 0:
            hvd.DistributedOptimizer(_sgd(first), process_set=alone)
        model = _model()
        optimizer = hvd.DistributedOptimizer(_sgd(model))
        _loss(model, job.rank, 0).backward()
        optimizer.step()
        assert _equal(model, job)
    finally:
        hvd.remove_process_set(alone)


def test_a_rank_outside_of_a_set_trains_alone(hvd: Any, job: Comm) -> None:
    others = hvd.add_process_set([0])
    try:
        model, reference = _model(), _model()
        optimizer, own = hvd.DistributedOptimizer(_sgd(model), process_set=others), _sgd(reference)
        for step in range(2):
            for m, o in ((model, optimizer), (reference, own)):
                o.zero_grad()
                _loss(m, job.rank, step).backward()
                o.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    finally:
        hvd.remove_process_set(others)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_are_as_many_buckets(hvd: Any, groups: int) -> None:
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), groups=groups)
    optimizer.step()
    buckets = optimizer.exchange_state_dict()["values"]["plan"]["buckets"]
    assert len(buckets) == groups
    assert sorted(len(bucket) for bucket in buckets)[-1] - len(buckets[-1]) <= 1


def test_parameters_that_are_listed_together_share_a_bucket(hvd: Any) -> None:
    names = ["a", "b", "c", "d"]
    parameters = {name: nn.Parameter(torch.zeros(100)) for name in names}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        parameters.items(),
        groups=[[parameters["a"], parameters["d"]], [parameters["c"]]],
    )
    optimizer.step()
    buckets = optimizer.exchange_state_dict()["values"]["plan"]["buckets"]
    assert sorted(map(sorted, buckets)) == [["a", "d"], ["b"], ["c"]]


def test_horovods_own_optimizer_gets_every_argument(hvd: Any) -> None:
    class Mine(hvd.Compression.none):  # type: ignore[misc,name-defined]
        pass

    wrapped = hvd.DistributedOptimizer(
        _sgd(_model()), compression=Mine, sparse_as_dense=True, gradient_predivide_factor=2.0, groups=1
    )
    assert (wrapped.sparse_as_dense, wrapped.gradient_predivide_factor, wrapped._groups) == (True, 2.0, 1)


def test_what_cannot_be_meant(hvd: Any) -> None:
    with pytest.raises(TaskError, match="no pairs of name and parameter"):
        hvd.DistributedOptimizer(_sgd(_model()), _model().parameters())
    with pytest.raises(ConfigError, match="negative"):
        hvd.DistributedOptimizer(_sgd(_model()), groups=-1)


def test_a_step_that_overflows_on_its_way_is_left_out_by_all(hvd: Any) -> None:
    """fp16 cannot carry 1e9 at first; the scale follows, and the step after next goes through."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), compression="fp16")
    moved = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            optimizer.zero_grad()
            (model.weight.sum() * 1e9).backward()
            before = model.weight.detach().clone()
            optimizer.step()
            assert bool(torch.isfinite(model.weight).all())
            moved.append(not torch.equal(before, model.weight))
    assert moved[0] is False and moved[-1] is True
    assert ["left out" in str(w.message) for w in said] == [True]
