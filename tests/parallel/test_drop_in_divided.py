"""`hvdtrain.torch` with `shard`: the parameters of a whole optimizer, and clear errors for what cannot be divided."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError, JoinedError, TaskError

STEPS = 4


pytestmark = pytest.mark.usefixtures("several")


def _model(rank: int = 0) -> nn.Module:
    torch.manual_seed(3 + rank)
    return nn.Sequential(nn.Embedding(500, 160), nn.Linear(160, 500), nn.Tanh(), nn.Linear(500, 160), nn.Linear(160, 1))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}], lr=1e-3
    )


def _made(hvd: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = _model()
    options = {"shard": "optimizer", **options}
    return model, hvd.DistributedOptimizer(_adamw(model), model.named_parameters(), **options)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randint(0, 500, (8,), generator=torch.Generator().manual_seed(1000 * rank + step))
    loss: Tensor = (model(x) - 1).pow(2).mean()
    return loss


def _train(hvd: Any, shard: str, **options: Any) -> tuple[list[float], nn.Module, Any]:
    """The usual script of a Horovod user; ranks start with different parameters."""
    model = _model(hvd.rank())
    optimizer = _adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), shard=shard, **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if shard != "none":  # stock Horovod's makes a step, which decays weights
        if hvd.rank():
            optimizer.param_groups[0].update(lr=7.0, betas=(0.1, 0.2))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(options.get("backward_passes_per_step", 1)):
            loss = _loss(model, hvd.rank(), 10 * step + part)
            loss.backward()
            losses.append(loss.item())
        losses.append(float(optimizer.clip_grad_norm_(1e-2)))
        optimizer.step()
        schedule.step()
    return losses, model, optimizer


def _steps(hvd: Any, model: nn.Module, optimizer: Any, steps: Sequence[int], *more: Any) -> None:
    for step in steps:
        model.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        for each in (optimizer, *more):
            each.step()


def _same(a: nn.Module, b: nn.Module, size: int) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        if size == 2:
            assert torch.equal(p, q), name
        else:
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shard", "options"),
    [
        ("optimizer", {}),
        ("gradients", {}),
        ("optimizer", {"backward_passes_per_step": 2}),
        ("optimizer", {"op": "Sum"}),
        ("optimizer", {"gradient_predivide_factor": 2.0, "gradient_as_bucket_view": True}),
    ],
    ids=str,
)
def test_a_divided_optimizer_trains_as_a_whole_one(hvd: Any, job: Comm, shard: str, options: dict[str, Any]) -> None:
    if "op" in options:
        options = {"op": hvd.Sum}
    losses, model, whole = _train(hvd, "none", **options)
    own_losses, own_model, divided = _train(hvd, shard, **options)
    _same(own_model, model, job.size)
    assert own_losses == (losses if job.size == 2 else pytest.approx(losses, rel=1e-4))
    expected, found = whole.gather_state_dict(), divided.gather_state_dict()
    assert bool(found) == bool(expected) == (hvd.rank() == 0)
    if found and job.size == 2:
        assert found["param_groups"] == expected["param_groups"]
        for number, slots in expected["state"].items():
            assert all(torch.equal(found["state"][number][slot], value) for slot, value in slots.items())

    def held(optimizer: Any) -> int:
        return sum(v.nbytes for slots in optimizer.state.values() for v in slots.values() if v.dim())

    parts = job.allgather(torch.tensor([held(divided)]), name="held").wait()
    assert int(parts.sum()) == held(whole) and int(parts.max()) < 0.8 * held(whole)


def test_compression_of_horovod_and_ours(hvd: Any, job: Comm) -> None:
    losses = _train(hvd, "none")[0]
    for compression in (hvd.Compression.fp16, "bf16", "int8", hvd.Compression.none):
        found, model, optimizer = _train(hvd, "optimizer", compression=compression)
        assert found == pytest.approx(losses, rel=2e-2)
        optimizer.gather_state_dict()
        for parameter in model.parameters():
            rows = job.allgather(parameter.detach().reshape(1, -1), name="same").wait()
            assert all(torch.equal(row, rows[0]) for row in rows)


def test_a_state_is_loaded_on_every_rank(hvd: Any, job: Comm) -> None:
    """Training resumes as if it was not interrupted, and a state on one rank alone is refused by all."""
    _, model, optimizer = _train(hvd, "optimizer")
    state = hvd.broadcast_object(optimizer.gather_state_dict(), root_rank=0)
    copy, resumed = _made(hvd)
    copy.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    for m, o in ((model, optimizer), (copy, resumed)):
        _steps(hvd, m, o, [99])
    _same(copy, model, 2)
    if hvd.rank() == 0:
        resumed.load_state_dict(state)
    with pytest.raises(TaskError, match="loaded on some ranks only"):
        hvd.broadcast_optimizer_state(resumed, root_rank=0)


def test_two_optimizers_in_one_backward(hvd: Any, job: Comm) -> None:
    found = []
    for shard in ("none", "optimizer"):
        model: Any = _model()
        halves = [model[:2], model[2:]]
        optimizers = [hvd.DistributedOptimizer(_adamw(half), shard=shard) for half in halves]
        _steps(hvd, model, optimizers[0], range(STEPS), *optimizers[1:])
        found.append(model)
    _same(found[1], found[0], job.size)


def test_what_shard_does_not_support(hvd: Any) -> None:
    class Mine(hvd.Compression.none):  # type: ignore[misc,name-defined]
        pass

    refused: list[tuple[str, dict[str, Any]]] = [
        ("op", {"op": hvd.Adasum}),
        ("compression of your own", {"compression": Mine}),
        ("topk", {"compression": "topk"}),
        ("groups", {"groups": 2}),
        ("groups", {"num_groups": 2}),
        ("sparse_as_dense", {"sparse_as_dense": True}),
        ("invalid shard", {"shard": "parameters"}),
    ]
    for message, options in refused:
        with pytest.raises(ConfigError, match=message):
            _made(hvd, **options)


def test_an_elastic_job_is_refused_and_so_is_its_state(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _made(hvd)
    with pytest.raises(TaskError, match="TorchState"):
        hvd.elastic.TorchState(model=model, optimizer=optimizer)
    module = importlib.import_module("hvdtrain.torch.optimizer")
    monkeypatch.setattr(module, "info", dataclasses.replace(module.info, variables={"HOROVOD_ELASTIC": "1"}))
    with pytest.raises(ConfigError, match="an elastic job"):
        _made(hvd)


def test_ranks_of_a_set(hvd: Any, job: Comm) -> None:
    """Ranks outside of the set, and one rank, are refused. On three ranks, two train among themselves."""
    alone = hvd.add_process_set([0])
    several = hvd.add_process_set(range(1, job.size)) if job.size > 2 else hvd.global_process_set
    try:
        for refused in (alone, several) if hvd.rank() == 0 and job.size > 2 else (alone,):
            with pytest.raises(ConfigError, match="2 or more ranks"):
                _made(hvd, process_set=refused)
        found = []
        for shard in ("none", "optimizer") if several.included() else ():
            model, optimizer = _made(hvd, process_set=several, shard=shard)
            if shard != "none":
                hvd.broadcast_optimizer_state(optimizer, root_rank=several.ranks[-1])
                with pytest.raises(ConfigError, match="root_rank"):
                    hvd.broadcast_optimizer_state(optimizer, root_rank=job.size)
            _steps(hvd, model, optimizer, range(STEPS))
            found.append(model)
        if found:
            _same(found[1], found[0], several.size())
    finally:
        hvd.remove_process_set(alone)
        if several is not hvd.global_process_set:
            hvd.remove_process_set(several)


def test_ranks_that_join_are_refused(hvd: Any, job: Comm) -> None:
    model, optimizer = _made(hvd)
    if hvd.rank() == 0:
        with pytest.raises(JoinedError, match="takes part only in sums"):
            _loss(model, 0, 0).backward()
            optimizer.step()
    hvd.join()
    with pytest.raises(TaskError, match="ranks may have changed"):
        optimizer.load_state_dict({"state": {}, "param_groups": _adamw(model).state_dict()["param_groups"]})
        model.zero_grad()
        _loss(model, 0, 0).backward()
