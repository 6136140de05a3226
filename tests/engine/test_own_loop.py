"""A user's loop trains with a divided optimizer as with a whole one."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.own_loops import (
    LOOPS,
    OPTIMIZERS,
    STEPS,
    Loop,
    Result,
    accumulation,
    changed_parameters,
    loss_of,
    make,
    plain,
    result,
    same_state,
)
from tests.support.thread_comm import ThreadComm, on_ranks


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_two_ranks_have_the_bits_of_a_whole_optimizer(loop: Loop) -> None:
    whole = on_ranks(2, lambda comm: loop(comm, "none"))
    divided = on_ranks(2, lambda comm: loop(comm, "optimizer"))
    for (losses, model, _), (own_losses, own_model, _) in zip(whole, divided, strict=True):
        assert own_losses == losses
        assert all(torch.equal(own_model[name], tensor) for name, tensor in model.items())
    same_state(divided[0][2], whole[0][2])
    assert divided[1][2] == {}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_any_optimizer_and_number_of_ranks(kind: str, size: int) -> None:
    whole = on_ranks(size, lambda comm: plain(comm, "none", kind))
    divided = on_ranks(size, lambda comm: plain(comm, "optimizer", kind))
    for rank in range(size):
        assert divided[rank][0] == (whole[rank][0] if size == 2 else pytest.approx(whole[rank][0], rel=2e-6))
        for name, tensor in divided[0][1].items():
            assert torch.equal(divided[rank][1][name], tensor), name
    if size == 2:
        same_state(divided[0][2], whole[0][2])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_of_each_pass_are_summed_as_those_of_all(kind: str) -> None:
    """With one pass, both ways of dividing have the same bits; with more, to rounding."""
    optimizer, gradients = (on_ranks(2, lambda comm, s=s: plain(comm, s, kind)) for s in ("optimizer", "gradients"))
    assert gradients[0][0] == optimizer[0][0]
    same_state(gradients[0][2], optimizer[0][2])
    whole, divided = (on_ranks(2, lambda comm, s=s: accumulation(comm, s)) for s in ("none", "gradients"))
    assert divided[0][0] == pytest.approx(whole[0][0], rel=2e-6)


@pytest.mark.parametrize("loop", [plain, changed_parameters], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
def test_compression_compresses_both_directions(compression: str, loop: Any) -> None:
    options = {"kind": "momentum"} if loop is plain else {}
    exact = on_ranks(2, lambda comm: loop(comm, "none", **options))
    coded = on_ranks(2, lambda comm: loop(comm, "optimizer", compression=compression, **options))
    assert coded[0][0] == pytest.approx(exact[0][0], rel=1e-3)
    assert not torch.equal(coded[0][1]["embedding.weight"], exact[0][1]["embedding.weight"])
    for name, tensor in exact[0][1].items():
        torch.testing.assert_close(coded[0][1][name], tensor, atol=2e-3, rtol=2e-3)
        assert torch.equal(coded[0][1][name], coded[1][1][name])


def scaled(comm: ThreadComm, shard: str, kind: str, *, unscale: bool, synchronize: bool) -> Result:
    """In step 2, rank 1 overflows, in what it owns; in step 4 both ranks do."""
    model, optimizer = make(comm, shard, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        if (step == 2 and comm.rank == 1) or step == 4:
            loss = loss + float("inf") * (model.layers[1].weight[-1, -1] + (step == 4) * model.embedding.weight[0, 0])
        scaler.scale(loss).backward()
        if synchronize:
            optimizer.synchronize()
        if unscale:
            scaler.unscale_(optimizer)
            losses.append(float(torch.nan_to_num(optimizer.clip_grad_norm_(0.1))))
        with optimizer.skip_synchronize() if synchronize else nullcontext():
            scaler.step(optimizer)
        scaler.update()
        losses += [float(torch.nan_to_num(loss.detach())), scaler.get_scale()]
    scales = losses[2 if unscale else 1 :: 3 if unscale else 2]
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 512.0]
    return result(losses, model, optimizer)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize(("unscale", "synchronize"), [(False, False), (True, False), (True, True)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind: str, unscale: bool, synchronize: bool) -> None:
    """AdamW is fused: it skips the step itself."""
    whole, divided = (
        on_ranks(2, lambda comm, s=s: scaled(comm, s, kind, unscale=unscale, synchronize=synchronize))
        for s in ("none", "optimizer")
    )
    for rank in range(2):
        assert divided[rank][0] == whole[rank][0]
        assert all(torch.equal(divided[rank][1][name], tensor) for name, tensor in whole[rank][1].items())
    same_state(divided[0][2], whole[0][2])


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
def test_a_step_whose_compressed_gradients_are_not_finite_is_skipped_on_all_ranks(compression: str) -> None:
    def body(comm: ThreadComm) -> list[bool]:
        model, optimizer = make(comm, "optimizer", "adamw", compression)
        changed = []
        for step in range(3):
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            (loss * float("nan") if step == 1 and comm.rank == 1 else loss).backward()
            optimizer.step()
            assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
            changed.append(not torch.equal(before["embedding.weight"], model.embedding.weight))
        return changed

    with pytest.warns(UserWarning, match="skipping a step") as said:
        assert on_ranks(2, body) == [[True, False, True]] * 2
    assert len(said) == 2
