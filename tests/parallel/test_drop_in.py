"""Training loops as users of `horovod.torch` write them, with the import changed: they give stock Horovod's parameters.

Each loop is written once, for a module `hvd` that is either of the two, and run by both, one after the other.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError, TaskError

STEPS = 6


@pytest.fixture
def both(hvd: Any) -> list[Any]:
    import horovod.torch as stock

    return [hvd, stock]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _called(model: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}/{n}", p) for n, p in model.named_parameters()]


def _made(hvd: Any, name: str, **options: Any) -> tuple[nn.Sequential, Any]:
    model = _model()
    return model, hvd.DistributedOptimizer(_sgd(model), named_parameters=_called(model, name), **options)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def _loss_of_words(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.tensor([step, rank, 7, 7])).pow(2).mean()


def _train(
    hvd: Any,
    model: nn.Module,
    optimizer: Any,
    steps: Sequence[int] = range(STEPS),
    loss: Callable[[nn.Module, int, int], Tensor] = _loss,
    clear: Callable[[], None] | None = None,
) -> nn.Module:
    """The usual loop; by default the optimizer clears the gradients."""
    for step in steps:
        (clear or optimizer.zero_grad)()
        loss(model, hvd.rank(), step).backward()
        optimizer.step()
    return model


def plain(hvd: Any, name: str) -> nn.Module:
    model, optimizer = _made(hvd, name)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return _train(hvd, model, optimizer)


def of_adamw_without_names(hvd: Any, name: str) -> nn.Module:
    model = _model()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    return _train(hvd, model, optimizer, clear=model.zero_grad)


def fp16_compression(hvd: Any, name: str) -> nn.Module:
    return _train(hvd, *_made(hvd, name, compression=hvd.Compression.fp16))


def a_minimum(hvd: Any, name: str) -> nn.Module:
    return _train(hvd, *_made(hvd, name, op=hvd.Min))


def groups_of_parameters(hvd: Any, name: str) -> nn.Module:
    model = _model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.1}]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=0.1),
        named_parameters=_called(model, name),
        groups=[[parameters[0], parameters[3]], [parameters[5]]],
    )
    return _train(hvd, model, optimizer)


def _of_words(
    hvd: Any, name: str, model: nn.Module, kind: Callable[..., torch.optim.Optimizer], **options: Any
) -> nn.Module:
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=_called(model, name), **options)
    return _train(hvd, model, optimizer, loss=_loss_of_words)


def a_sparse_embedding(hvd: Any, name: str) -> nn.Module:
    torch.manual_seed(3)
    return _of_words(hvd, name, nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 1)), torch.optim.SGD)


def sparse_as_dense(hvd: Any, name: str) -> nn.Module:
    """Gradients are sparse afterwards, as SparseAdam wants them."""
    torch.manual_seed(3)
    return _of_words(hvd, name, nn.Embedding(20, 6, sparse=True), torch.optim.SparseAdam, sparse_as_dense=True)


def clipping(hvd: Any, name: str) -> nn.Module:
    model, optimizer = _made(hvd, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    return model


def accumulation(hvd: Any, name: str) -> nn.Module:
    """Of a number of passes that changes in both directions."""
    counts = (3, 3, 1, 1, 2, 2)
    model, optimizer = _made(hvd, name, backward_passes_per_step=3)
    for step, passes in enumerate(counts):
        if step and passes != counts[step - 1]:
            optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for part in range(passes):
            (_loss(model, hvd.rank(), 3 * step + part) / passes).backward()
        optimizer.step()
    return model


def mixed_precision(hvd: Any, name: str) -> nn.Module:
    """With a step whose gradients overflow: the scaler skips it."""
    model, optimizer = _made(hvd, name)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _loss(model, hvd.rank(), step) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return model


def sum_and_predivision(hvd: Any, name: str) -> nn.Module:
    model = _model()
    front, back = model[:2], model[2:]
    first = hvd.DistributedOptimizer(_sgd(front), named_parameters=_called(front, f"{name}/front"), op=hvd.Sum)
    second = hvd.DistributedOptimizer(
        _sgd(back), named_parameters=_called(back, f"{name}/back"), gradient_predivide_factor=3.0
    )
    for step in range(STEPS):
        model.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        first.step()
        second.step()
    return model


def schedules(hvd: Any, name: str) -> nn.Module:
    model = _model()
    optimizer = _sgd(model)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=_called(model, name))
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        optimizer.step()
        before.step()
        after.step()
    return model


def a_layer_that_idles(hvd: Any, name: str) -> nn.Module:
    """It is used by rank 0, in every other step."""
    model = _model()
    extra = nn.Linear(1, 1)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return _loss(model, rank, step) + (extra(torch.ones(1, 1)).sum() if rank == 0 and step % 2 == 0 else 0)

    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1),
        named_parameters=[*_called(model, name), *_called(extra, f"{name}/extra")],
    )
    _train(hvd, model, optimizer, loss=loss)
    model.extra = extra
    return model


def ranks_that_join(hvd: Any, name: str) -> nn.Module:
    """Rank r has r batches the first time, so that one joins before its first step, and all alike the second time."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 1))  # of the first few rows have a gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=_called(model, name))
    for batches in (hvd.rank(), 2, hvd.size() - hvd.rank(), 2):
        _train(hvd, model, optimizer, range(batches), _loss_of_words)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    return model


def a_flat_buffer_of_the_users(hvd: Any, name: str) -> nn.Module:
    """Gradients lie in it, and the update is made of it."""
    model, optimizer = _made(hvd, name)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    pieces = flat.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    for step in range(STEPS):
        flat.zero_()
        _loss(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        flat /= flat.norm()
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data -= 0.1 * piece.view_as(parameter)
    return model


def gradients_that_are_kept(hvd: Any, name: str) -> nn.Module:
    """Each step follows those of the step before, too."""
    model, optimizer = _made(hvd, name)
    kept: list[Tensor] = []
    for step in range(STEPS):
        model.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), kept, strict=False):
                parameter -= 0.1 * gradient
        kept = [p.grad for p in model.parameters() if p.grad is not None]
    return model


def synchronize_and_step(hvd: Any, name: str) -> nn.Module:
    """Without `skip_synchronize`: what each rank has made of its sums is exchanged again, as by synchronize twice."""
    model = _model()
    front, back = model[:2], model[2:]
    first = hvd.DistributedOptimizer(_sgd(front), named_parameters=_called(front, f"{name}/front"))
    second = hvd.DistributedOptimizer(_sgd(back), named_parameters=_called(back, f"{name}/back"), op=hvd.Sum)
    for step in range(STEPS):
        model.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        for optimizer, part in ((first, front), (second, back)):
            for _ in range(1 + step % 2):
                optimizer.synchronize()
                for parameter in part.parameters():
                    parameter.grad.mul_(0.3 * (1 + hvd.rank()))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizer.step()
            assert any("synchronize" in str(one.message) for one in said)
    return model


LOOPS: list[Callable[[Any, str], nn.Module]] = [
    plain,
    of_adamw_without_names,
    clipping,
    accumulation,
    mixed_precision,
    fp16_compression,
    a_minimum,
    sum_and_predivision,
    groups_of_parameters,
    schedules,
    a_layer_that_idles,
    a_sparse_embedding,
    sparse_as_dense,
    ranks_that_join,
    a_flat_buffer_of_the_users,
    gradients_that_are_kept,
    synchronize_and_step,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_law_6_the_same_script_gives_the_same_parameters(
    loop: Callable[[Any, str], nn.Module], both: list[Any], job: Comm
) -> None:
    ours, stock = both
    mine = loop(ours, f"ours/{loop.__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock Horovod's schedulers warn
        theirs = loop(stock, f"stock/{loop.__name__}")
    tolerance = 2e-3 if loop is fp16_compression else 1e-5
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    everyone = [job.allgather(p.detach().reshape(1, -1), name="same").wait() for p in mine.parameters()]
    assert all(torch.equal(row, rows[0]) for rows in everyone for row in rows), "ranks drifted apart"


def test_horovods_fp16_is_ours(hvd: Any) -> None:
    """Beyond law 6, which fp32 would hold too: of 1 + 2**-12 the gradient that came keeps no more than 11 bits."""
    found = {}
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=compression)
        (parameter * (1 + 2**-12)).sum().backward()
        optimizer.step()
        found[compression] = parameter.item()
    halved = -1.0 if hvd.size() > 1 else -1 - 2**-12  # one rank sends nothing
    assert found == {hvd.Compression.none: -1 - 2**-12, hvd.Compression.fp16: halved}


MODULES = "compression functions mpi_ops optimizer sync_batch_norm elastic elastic.sampler elastic.state"


def test_submodules_are_horovods_of_which_there_is_one_copy(hvd: Any) -> None:
    for name in MODULES.split():
        mine, theirs = (importlib.import_module(f"{package}.torch.{name}") for package in ("hvdtrain", "horovod"))
        ours = {"DistributedOptimizer", "run"}
        for found in (n for n in dir(theirs) if not n.startswith("_") and n not in ours):
            assert getattr(mine, found) is getattr(theirs, found), (name, found)
        if name == "optimizer":
            assert mine.DistributedOptimizer is hvd.DistributedOptimizer is not theirs.DistributedOptimizer


@pytest.mark.parametrize("order", ["wrap broadcast", "broadcast wrap", "wrap elastic"])
def test_a_broadcast_of_the_optimizer_is_no_step(hvd: Any, order: str) -> None:
    """Stock's decays the weights of ranks without state, and corrects Adam's bias wrongly from then on."""
    model = _model()
    before = copy.deepcopy(model.state_dict())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + hvd.rank()), weight_decay=0.1)
    for what in order.split():
        if what == "wrap":
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=_called(model, order.replace(" ", "_")))
        elif what == "elastic":
            hvd.elastic.TorchState(model, optimizer).sync()
        else:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("before", [1.0, 0.5])
@pytest.mark.parametrize("after", [1.0, 3.0])
def test_reducescatter_scales(hvd: Any, job: Comm, before: float, after: float) -> None:
    rows = torch.arange(4.0 * job.size).reshape(-1, 2)
    factors = {"prescale_factor": before, "postscale_factor": after}
    kept = rows.clone()
    one = hvd.reducescatter(rows, op=hvd.Sum, name="one", **factors)
    more = hvd.grouped_reducescatter([rows, 2 * rows], op=hvd.Average, name="more", **factors)
    mine = before * after * rows[2 * job.rank : 2 * job.rank + 2]
    for found, expected in ((one, mine * job.size), (more[0], mine), (more[1], 2 * mine)):
        torch.testing.assert_close(found, expected)
    assert torch.equal(rows, kept)


def test_the_optimizer_stays_what_it_was(hvd: Any) -> None:
    """Type, state and state_dict; wrapped before or after state is loaded."""
    model = _model()
    plain_optimizer = _sgd(model)
    _loss(model, 0, 0).backward()
    plain_optimizer.step()
    saved = copy.deepcopy(plain_optimizer.state_dict())
    optimizer = hvd.DistributedOptimizer(plain_optimizer, _called(model, "state"))
    assert optimizer is plain_optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    _same(optimizer.state_dict(), saved)
    other = hvd.DistributedOptimizer(_sgd(_model()))
    other.load_state_dict(saved)
    _same(other.state_dict(), saved)
    with pytest.raises(TaskError, match="is distributed already"):
        hvd.DistributedOptimizer(optimizer)


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, slots in expected["state"].items():
        assert torch.equal(found["state"][number]["momentum_buffer"], slots["momentum_buffer"])


def test_a_closure_is_followed_with_summed_gradients(hvd: Any, job: Comm) -> None:
    """A line search reads the loss, too, and each rank returns its own. The reference is one rank with all samples."""
    model, alone = _model(), _model()
    how: dict[str, Any] = {"max_iter": 5, "line_search_fn": "strong_wolfe"}
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **how))
    reference = torch.optim.LBFGS(alone.parameters(), **how)

    def closure(m: nn.Module, o: torch.optim.Optimizer, ranks: Sequence[int]) -> Tensor:
        o.zero_grad()
        loss = sum(_loss(m, rank, 0) for rank in ranks) / len(ranks)
        loss.backward()
        return loss

    for _ in range(2):
        mean = optimizer.step(lambda: closure(model, optimizer, [job.rank]))
        expected = reference.step(lambda: closure(alone, reference, range(job.size)))
        torch.testing.assert_close(mean, expected, check_dtype=False, rtol=1e-3, atol=1e-4)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_cleared_either_way(hvd: Any, to_none: bool) -> None:
    model, other = _model(), _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    reference = hvd.DistributedOptimizer(_sgd(other))
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        assert all(p.grad is None if to_none or step == 0 else not p.grad.any() for p in model.parameters())
        other.zero_grad()
        for m, o in ((model, optimizer), (other, reference)):
            _loss(m, hvd.rank(), step).backward()
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def _follows_one_rank(hvd: Any, model: nn.Module, optimizer: Any, ranks: Sequence[int], count: int) -> None:
    """With samples on `ranks` only, it has the parameters of one rank with their samples, over `count`."""
    alone = _model()
    reference = _sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        if hvd.rank() in ranks:
            _loss(model, hvd.rank(), step).backward()
        for rank in ranks:
            (_loss(alone, rank, step) / count).backward()
        optimizer.step()
        reference.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_idle_rank_takes_part(hvd: Any) -> None:
    """Rank 0 alone has samples; the others call step() all the same, as with stock Horovod."""
    model = _model()
    _follows_one_rank(hvd, model, hvd.DistributedOptimizer(_sgd(model)), [0], hvd.size())


def test_some_of_the_ranks(several: Any) -> None:
    """Even and odd ranks, each among themselves."""
    sets = [several.add_process_set(range(first, several.size(), 2)) for first in range(2)]
    try:
        mine, model = sets[several.rank() % 2], _model()
        optimizer = several.DistributedOptimizer(_sgd(model), process_set=mine)
        _follows_one_rank(several, model, optimizer, mine.ranks, mine.size())
    finally:
        for one in sets:
            several.remove_process_set(one)


def test_compression_carries_on_over_a_checkpoint(hvd: Any, job: Comm) -> None:
    """Saving changes no training; the mean of the residuals continues nearer to it than none."""
    first, optimizer = _made(hvd, "first", compression="powersgd:1")
    unsaved, never = _made(hvd, "first", compression="powersgd:1")
    _train(hvd, first, optimizer, range(3))
    saved = copy.deepcopy([first.state_dict(), optimizer.state_dict(), optimizer.exchange_state_dict()])
    for name, tensor in sorted(saved[2]["tensors"].items()):
        rows = job.allgather(tensor.reshape(1, -1), name="carried").wait()
        assert all(torch.equal(row, rows[0]) for row in rows), f"{name} is not the same on all ranks"
    _train(hvd, first, optimizer, range(3, 6))
    _train(hvd, unsaved, never, range(6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), unsaved.parameters(), strict=True))
    off = []
    for with_residuals in (True, False):
        second, resumed = _made(hvd, "first", compression="powersgd:1")
        second.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        if with_residuals:
            resumed.load_exchange_state_dict(saved[2])
        _train(hvd, second, resumed, range(3, 6))
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        off.append(sum(float((a - b).detach().square().sum()) for a, b in pairs))
    assert off[0] <= off[1] / 4


def test_adasum_and_own_compressors_are_horovods(both: list[Any]) -> None:
    ours, stock = both

    class Mine(stock.Compression.none):  # type: ignore[misc,name-defined]
        pass

    more = {"sparse_as_dense": True, "gradient_predivide_factor": 2.0, "groups": 1}
    made = [
        ours.DistributedOptimizer(_sgd(_model()), **how)
        for how in ({"op": ours.Adasum}, {"compression": Mine, **more}, {})
    ]
    assert [hasattr(each, "_register_hooks") for each in made] == [True, True, False]
    assert (made[1].sparse_as_dense, made[1].gradient_predivide_factor, made[1]._groups) == (True, 2.0, 1)
    with pytest.raises(ConfigError, match="powersgd:4"):
        ours.DistributedOptimizer(_sgd(_model()), op=ours.Adasum, compression="powersgd:4")


@pytest.mark.parametrize(
    "arguments",
    [{"backward_passes_per_step": 0}, {"gradient_predivide_factor": -1.0}, {"compression": "gzip"}],
    ids=str,
)
def test_arguments_that_make_no_sense(hvd: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        hvd.DistributedOptimizer(_sgd(_model()), **arguments)
