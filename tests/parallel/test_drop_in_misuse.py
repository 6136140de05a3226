"""What scripts of Horovod's users also do: change parameters on the way, leave steps out, load a state on one rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import CallOrderError, JoinedError, TaskError
from tests.parallel.test_drop_in import _called, _loss, _model, _sgd, _train


def _made(hvd: Any, **options: Any) -> tuple[nn.Sequential, Any]:
    model = _model()
    return model, hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), **options)


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
    assert _equal(extra, job) and _equal(model, job)


@pytest.mark.parametrize("compression", ["none", "powersgd:1"])
def test_parameters_freed_between_steps_are_exchanged_at_once(hvd: Any, job: Comm, compression: str) -> None:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), compression=compression)
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        _train(hvd, model, optimizer, [step])
        assert _equal(model, job), step


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_that_one_rank_loads_reaches_the_others(hvd: Any, job: Comm, steps: int) -> None:
    """Those without any make room for it by a step of their own, in which the one that has it takes no part."""
    model, optimizer = _made(hvd)
    other = _model()
    plain = _sgd(other)
    _loss(other, 0, 0).backward()
    plain.step()
    _train(hvd, model, optimizer, range(steps))
    if job.rank == 0:
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], plain.state[q]["momentum_buffer"])
    _train(hvd, model, optimizer, range(steps, steps + 2))
    assert _equal(model, job)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_unscales_what_is_summed(hvd: Any, job: Comm, unscale: bool, views: bool) -> None:
    """torch's own recipe, without `synchronize`: as with it."""
    model, other = _model(), _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), gradient_as_bucket_view=views)
    reference = hvd.DistributedOptimizer(_sgd(other))
    scaler, its = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale(_loss(model, job.rank, step)).backward()
        its.scale(_loss(other, job.rank, step)).backward()
        reference.synchronize()
        if unscale:
            scaler.unscale_(optimizer)
            its.unscale_(reference)
            for one in (model, other):
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        scaler.step(optimizer)
        with reference.skip_synchronize():
            its.step(reference)
        scaler.update()
        its.update()
    assert _equal(model, job)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clear": lambda model: model.zero_grad(),
    "replace": lambda model: setattr(model[0].weight, "grad", torch.zeros_like(model[0].weight)),  # type: ignore[index]
    "scale data": lambda model: [p.grad.data.mul_(0.5) for p in model.parameters()],  # type: ignore[union-attr]
    "clamp data of one": lambda model: model[2].bias.grad.data.clamp_(-1e-6, 1e-6),  # type: ignore[index]
    "replace data": lambda model: setattr(model[0].weight.grad, "data", torch.ones(16, 6)),  # type: ignore[index]
    "poison data": lambda model: model[4].weight.grad.data.fill_(float("nan")),  # type: ignore[index]
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_on_their_way_are_not_changed(several: Any, job: Comm, change: str) -> None:
    """The optimizer refuses to clear them, and a step with others."""
    model, optimizer = _made(several)
    for step in range(2):
        _loss(model, job.rank, step).backward()
        with pytest.raises(TaskError, match="being exchanged"):
            optimizer.zero_grad()
        CHANGES[change](model)
        with pytest.raises(CallOrderError, match="changed after backward"):
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())  # begins anew
        model.zero_grad()


def test_hooks_of_parameters_may_change_gradients(several: Any, job: Comm) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    found = []
    for when in ("before", "after", "never"):
        model, optimizer = _model(), None
        for what in {"before": "hook wrap", "after": "wrap hook", "never": "wrap"}[when].split():
            if what == "wrap":
                plain = torch.optim.SGD(model.parameters(), lr=0.05 if when == "never" else 0.1)
                optimizer = several.DistributedOptimizer(plain, _called(model, when))
            else:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(halve)
        found.append([p.detach().clone() for p in _train(several, model, optimizer).parameters()])
    assert _equal(model, job)
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


def test_compression_that_does_not_go_with_join_says_so(several: Any, job: Comm) -> None:
    model, optimizer = _made(several, compression="int8")
    _train(several, model, optimizer, range(2))
    if job.rank == 0:
        with pytest.raises(JoinedError, match="takes part only in sums") as caught:
            _loss(model, job.rank, 3).backward()  # raises where the other rank has joined already
            optimizer.step()
        refused = caught.value.what.partition(" ")[0]
        assert refused not in optimizer._hvdtrain_exchange.reducer.comm.in_flight
    several.join()
    optimizer.load_state_dict(optimizer.state_dict())
    several.broadcast_parameters(model.state_dict(), root_rank=0)
    _train(several, model, optimizer, [4])
    assert _equal(model, job)


@pytest.mark.parametrize("compression", ["fp16", "powersgd:1"])
def test_what_compression_learned_while_others_had_joined_is_forgotten(hvd: Any, job: Comm, compression: str) -> None:
    model, optimizer = _made(hvd, compression=compression)
    for batches in (2 + 3 * (job.rank == 0), 4):
        for step in range(batches):
            optimizer.zero_grad()
            (1e5 * _loss(model, job.rank, step)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.exchange_state_dict()["tensors"]
    for name, tensor in sorted(state.items()):
        rows = job.allgather(tensor.reshape(1, -1), name="state").wait()
        assert all(torch.equal(row, rows[0]) for row in rows), name


MISUSES: dict[str, Callable[[Any, nn.Module], object]] = {
    "pairs": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), named_parameters=model.parameters()),
    "double": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), [("x", p) for p in model.parameters()]),
    "unnamed": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), list(model.named_parameters())[:-1]),
    "negative groups": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), groups=-1),
    "no groups": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), groups=0),
    "no tensors": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), groups=[["0.weight"]]),
    "listed twice": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), groups=2 * [list(model.parameters())]),
    "predivide": lambda hvd, model: hvd.DistributedOptimizer(_sgd(model), op=hvd.Sum, gradient_predivide_factor=2.0),
    "second backward": lambda hvd, model: _backward(hvd, model, 1),
    "third of two": lambda hvd, model: _backward(hvd, model, 2),
    "clear": lambda hvd, model: _clear_after_backward(hvd, model),
}


def _backward(hvd: Any, model: nn.Module, passes: int, **options: Any) -> None:
    optimizer = hvd.DistributedOptimizer(_sgd(model), backward_passes_per_step=passes, **options)
    for _ in range(passes + (hvd.size() > 1)):
        _loss(model, 0, 0).backward()
    optimizer.step()


def _clear_after_backward(hvd: Any, model: nn.Module) -> None:
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    _loss(model, 0, 0).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_stock_refuses_is_refused_by_an_error_of_the_same_class(hvd: Any, job: Comm, misuse: str) -> None:
    import horovod.torch as stock

    def of(module: Any) -> BaseException | None:
        try:
            MISUSES[misuse](module, _model())
        except Exception as error:
            return error
        finally:
            job.barrier()
        return None

    theirs, ours = of(stock), of(hvd)
    assert (theirs is None) == (ours is None), (theirs, ours)
    assert ours is None or isinstance(ours, type(theirs))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_too_many_backward_passes_are_refused_in_the_first_step(several: Any, views: bool, passes: int) -> None:
    with pytest.raises(CallOrderError, match="second gradient in the last backward pass"):
        _backward(several, _model(), passes, gradient_as_bucket_view=views)


@pytest.mark.parametrize("views", [False, True])
def test_a_newer_optimizer_of_the_same_parameters_replaces_the_older(several: Any, job: Comm, views: bool) -> None:
    expected, model = _model(), _model()
    _train(several, expected, several.DistributedOptimizer(_sgd(expected)))
    older, newer = (several.DistributedOptimizer(_sgd(model), gradient_as_bucket_view=views) for _ in range(2))
    _train(several, model, newer)
    for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, other)
    with pytest.raises(CallOrderError, match="a newer DistributedOptimizer"):
        older.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Dynamo itself
@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}, {"shard": "gradients"}], ids=str)
def test_a_compiled_function_may_train(several: Any, job: Comm, options: dict[str, Any]) -> None:
    """A step, also with clipping: Dynamo leaves out the exchange."""
    trained = []
    for is_compiled in (False, True):
        model, optimizer = _made(several, **options)

        def step(number: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            _loss(model, job.rank, number).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()

        run = torch.compile(step, backend="eager") if is_compiled else step
        for number in range(3):
            run(number)
        trained.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_public_attributes_are_stock_horovods(hvd: Any) -> None:
    import horovod.torch as stock

    made = [module.DistributedOptimizer(_sgd(_model()), backward_passes_per_step=2) for module in (hvd, stock)]
    for optimizer in made:
        optimizer.set_backward_passes_per_step(3)
    ours, theirs = ({n for n in dir(one) if not n.startswith("_")} for one in made)
    assert theirs - ours <= {"find_duplicates"}
    for name in ("backward_passes_per_step", "op", "gradient_predivide_factor", "sparse_as_dense", "process_set"):
        assert getattr(made[0], name) == getattr(made[1], name), name


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
        _train(hvd, model, optimizer, [step])
        optimizer.load_state_dict(optimizer.state_dict())
    assert called == [3]


def test_ranks_of_a_set_name_their_exchange_apart_from_the_others(several: Any, job: Comm) -> None:
    alone = several.add_process_set([0])
    try:
        first = _model()
        if job.rank == 0:
            several.DistributedOptimizer(_sgd(first), process_set=alone)
        model = _model()
        _train(several, model, several.DistributedOptimizer(_sgd(model)), [0])
        assert _equal(model, job)
    finally:
        several.remove_process_set(alone)


def test_a_rank_outside_of_a_set_trains_alone(several: Any, job: Comm) -> None:
    others = several.add_process_set([0])
    try:
        model, reference = _model(), _model()
        _train(several, model, several.DistributedOptimizer(_sgd(model), process_set=others), range(2))
        _train(several, reference, _sgd(reference), range(2))
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    finally:
        several.remove_process_set(others)


def _buckets(hvd: Any, groups: Any, parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), groups=groups
    )
    optimizer.step()
    return [sorted(bucket) for bucket in optimizer.exchange_state_dict()["values"]["plan"]["buckets"]]


def test_groups_are_buckets(several: Any) -> None:
    """As many as asked for, of about equal size, or those that list parameters; who is in none is alone."""
    parameters = {name: nn.Parameter(torch.zeros(100)) for name in "abcd"}
    assert [sorted(map(len, _buckets(several, count, parameters))) for count in (1, 2, 3)] == [[4], [2, 2], [1, 1, 2]]
    listed = [[parameters["a"], parameters["d"]], [parameters["c"]]]
    assert sorted(_buckets(several, listed, parameters)) == [["a", "d"], ["b"], ["c"]]


def test_a_step_that_overflows_on_its_way_is_left_out_by_all(several: Any) -> None:
    """fp16 cannot carry 1e9 at first; the scale follows, and the step after next goes through."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = several.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), compression="fp16")
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
    assert ["not finite" in str(w.message) for w in said] == [True]
