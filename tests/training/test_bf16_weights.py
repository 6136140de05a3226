"""bf16 copies of weights: what computes with them, what stays fp32, and that nothing of them is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.engine.blocks import blocks
from hvdtrain.training.loop.bf16_weights import Bf16Weights
from tests.support.gallery import Recorded
from tests.support.stack import STACK, VARIANTS, Stack

LOW = "--precision=bf16-weights"
TOKENS = torch.arange(12).view(2, 6)


def _stack(**options: bool) -> Stack:
    torch.manual_seed(3)
    return Stack(**{"checkpoints": False, "statistics": False, "dropout": 0.0, "again": False, **options})


def _entries(model: nn.Module) -> list[tuple[int, str]]:
    return [(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_shared_and_leave_nothing(fails: bool) -> None:
    """Tied parameters have one copy, frozen ones have copies without a gradient; an error leaves none in the model."""
    model = _stack()
    before = _entries(model)
    weights = Bf16Weights(model)
    try:
        with weights():
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            assert model.head.weight is model.embedding.weight and model.head.weight.requires_grad
            assert not model.frozen.weight.requires_grad
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert _entries(model) == before and {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(TOKENS).dtype == torch.float32  # the hooks do nothing now
    assert torch.equal(model(TOKENS), _stack()(TOKENS))


def test_gradients_of_passes_are_summed_in_fp32() -> None:
    """The sum over two micro-batches is that of the gradients of each, which a bf16 sum would round."""
    model = _stack()
    weights = Bf16Weights(model)
    apart = []
    for tokens in (TOKENS, TOKENS + 3):
        with weights():
            model(tokens).square().sum().backward()
        apart.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    with weights():
        for tokens in (TOKENS, TOKENS + 3):
            model(tokens).square().sum().backward()
    sums = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(total, one + two) for total, one, two in zip(sums, *apart, strict=True))
    assert any(not torch.equal(total, total.bfloat16().float()) for total in sums)


def test_blocks_compute_in_bf16_and_the_model_returns_fp32() -> None:
    model, seen = _stack(), list[torch.dtype]()
    weights = Bf16Weights(model)
    for block in blocks(model):
        block.inner.register_forward_hook(lambda _, given, out: seen.extend((given[0].dtype, out.dtype)))  # type: ignore[operator, union-attr]
    with weights():
        assert model(TOKENS).dtype == torch.float32
    assert set(seen) == {torch.bfloat16} and len(seen) == 6


@pytest.mark.parametrize("again", [False, True])
def test_a_recomputation_in_backward_has_the_same_weights(again: bool) -> None:
    """Also of a block that runs twice: not so with autocast, which casts weights again."""
    gradients = []
    for checkpoints in (False, True):
        model = _stack(checkpoints=checkpoints, again=again, dropout=False)
        with Bf16Weights(model)():
            model(TOKENS).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Odd(nn.Module):
    """Modules that need more than a new entry: running statistics, a recurrent module, sparse gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made: dict[str, Callable[[], nn.Module]] = {
            "statistics": lambda: nn.BatchNorm1d(4),
            "recurrent": lambda: nn.LSTM(4, 4),
            "sparse": lambda: nn.Embedding(9, 4, sparse=True),
        }
        self.layers = nn.ModuleList([made[kind]()])

    def forward(self, x: Tensor) -> Any:
        return self.layers[0](x.long() if isinstance(self.layers[0], nn.Embedding) else x)


@pytest.mark.parametrize("kind", ["statistics", "recurrent", "sparse"])
def test_modules_that_need_more(kind: str) -> None:
    torch.manual_seed(3)
    model = Odd(kind)
    x = torch.randint(0, 9, (6, 4)).float()
    expected, found = [], []
    for gradients, context in ((expected, None), (found, Bf16Weights(model))):
        for _ in range(2):
            with context() if context else torch.enable_grad():
                out = model(x)
                (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        raw = [p.grad for p in model.parameters() if p.grad is not None]
        assert {gradient.is_sparse for gradient in raw} == {kind == "sparse"}
        gradients += [gradient.to_dense() for gradient in raw]
        model.zero_grad()
    kept = [*found, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0.03, atol=0.03)
    assert any(not torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    flat = getattr(model.layers[0], "_flat_weights", [])  # those of a recurrent module: its parameters again
    assert {id(weight) for weight in flat} <= {id(p) for p in model.parameters()}


@pytest.mark.parametrize("variant", ["uneven", "adagrad"])
def test_laws_1_and_2(variant: str, trained: Callable[..., Recorded]) -> None:
    """Also with divided gradients and with idle ranks; two ranks that were stopped have the bits of two that were not.

    A checkpoint holds fp32 weights that are no bf16 values, as in other precisions.
    """
    given = (*STACK, LOW, *VARIANTS[variant])
    one = trained("one", *given, size=1)
    whole = trained("whole", *given, "--parallel.shard=gradients", size=2)
    for stop in (3, 6):
        parts = trained("parts", *given, "--parallel.shard=gradients", f"--train.stop_at={stop}", size=2)
    assert whole.losses() == pytest.approx(one.losses(), rel=1e-3)
    assert parts.losses() == whole.losses()
    tensors = whole.state().tensors
    assert all(torch.equal(tensor, parts.state().tensors["model"][name]) for name, tensor in tensors["model"].items())
    weight = tensors["model"]["embedding.weight"]
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())


def test_the_origin_of_a_number_that_is_not_finite_is_found(trained: Callable[..., Recorded]) -> None:
    """The replay runs with copies, too: only bf16 rounds 257 to 256. A block gets an fp32 sum, which is cast."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.shift = nn.Buffer(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            bad = torch.where(x == 256, math.nan, 0.0).to(x.dtype)
            return self.layers[1](self.layers[0](x) + bad + self.shift).sum()

    def build(rank: int) -> Task:
        torch.manual_seed(0)
        x = torch.ones(8, 2)
        x[3] = 257
        data = torch.utils.data.TensorDataset(x)
        return Task(Root(), lambda model, batch: (model(batch[0]), len(batch[0])), data)

    options = (LOW, "--train.steps=2", "--train.global_batch=4", "--train.micro_batch=4", "--checkpoint.every=0")
    (found,) = trained("one", *options, "--train.max_skipped=9", size=1, build=build).events("not_finite")
    assert (found["kind"], found["indices"], found["failures"]) == ("forward", [3], {})
