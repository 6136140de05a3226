"""Activation checkpointing changes memory and time only: not a bit of gradients, buffers or random numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.training.loop.blocks import checkpoint_blocks
from tests.support.gallery import LANGUAGE, Recorded
from tests.support.stack import Stack

MODES = pytest.mark.parametrize("mode", ["full", "selective"])


class Block(nn.Module):
    """A dropout, running statistics, and a tensor that comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x + scale * self.dropout(self.narrow(torch.tanh(self.wide(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.square().mean()
        for layer in self.layers:
            x = layer(x, scale=scale)
        return x


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widths: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.widths[out.shape[1]] += 1
        return out


def _passes(model: nn.Module, run: Callable[[nn.Module], Tensor], context: AbstractContextManager[Any]) -> list[Tensor]:
    """Two passes; return losses, gradients, buffers, and a random number drawn at the end."""
    torch.manual_seed(4)
    losses = []
    for _ in range(2):
        with context:
            loss = run(model)
        with torch.random.fork_rng():  # numbers drawn between forward and backward
            torch.rand(5)
            loss.backward()
        losses.append(loss.detach())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *grads, *model.buffers(), torch.rand(1)]


def _check_equal(
    build: Callable[[], nn.Module], mode: str, run: Callable[[nn.Module], Tensor], precision: Any = None
) -> None:
    torch.manual_seed(3)
    recomputed = copy.deepcopy(plain := build())
    checkpoint_blocks(recomputed, mode)
    assert [*recomputed.state_dict()] == [*plain.state_dict()]
    context = torch.autocast("cpu", precision) if precision else nullcontext()
    expected, found = (_passes(model, run, context) for model in (plain, recomputed))
    assert len(found) == len(expected) > 3
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) or (precision and (other - one).norm() < 0.01 * one.norm())


@MODES
def test_dropout_statistics_and_keywords(mode: str) -> None:
    _check_equal(Model, mode, lambda model: model(torch.linspace(-1, 1, 48).view(6, 8)).square().sum())


@MODES
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_blocks_that_run_twice_in_a_pass(precision: Any, mode: str) -> None:
    """With autocast, the second run would find weights that the first has cast; gradients are then sums in bf16."""
    build = partial(Stack, checkpoints=False, statistics=False, dropout=0.3, again=True)
    tokens = torch.arange(12).view(2, 6)
    _check_equal(build, mode, lambda model: model(tokens).float().square().sum(), precision)


@MODES
def test_a_model_of_transformers_that_caches_keys(mode: str) -> None:
    """It also has a mixture of experts."""
    model = causal_lm(ModelConfig("tiny", dropout=0.2), vocabulary=64, seq_len=8)
    model.config.use_cache = True
    ids = torch.arange(16).view(2, 8)
    _check_equal(lambda: model, mode, lambda model: model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(("mode", "again"), [("none", {}), ("full", {8: 3, 32: 3}), ("selective", {32: 3})])
def test_what_is_computed_again(mode: str, again: dict[int, int]) -> None:
    """Full: all. Selective: products that widen much; the narrow ones are kept."""
    model = Model()
    checkpoint_blocks(model, mode)
    with Products() as forward:
        loss = model(torch.randn(6, 8)).square().sum()
    with Products() as backward:
        loss.backward()
    assert forward.widths == {8: 3, 32: 3} and backward.widths == again


@MODES
def test_an_evaluation_pays_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    checkpoint_blocks(model, mode)
    monkeypatch.delattr("hvdtrain.training.loop.blocks.checkpoint")
    with torch.no_grad():
        model(torch.randn(6, 8))
    with pytest.raises(NameError, match="checkpoint"):
        model(torch.randn(6, 8))


def test_what_cannot_be_recomputed_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpointing full, but the model has no blocks to recompute"):
        checkpoint_blocks(nn.Linear(1, 1), "full")
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Tanh())])})
    checkpoint_blocks(model, "selective")
    with pytest.raises(TaskError, match="in place") as caught:
        model["layers"][0](torch.ones(2, 4)).sum().backward()  # type: ignore[index]
    assert "--memory.checkpointing full" in str(caught.value)


def test_recomputation_is_not_counted_as_work(trained: Callable[..., Recorded]) -> None:
    options = (*LANGUAGE, "--train.steps=1", "--checkpoint.every=0")
    runs = [trained(mode, *options, f"--memory.checkpointing={mode}", size=1) for mode in ("none", "selective")]
    once, again = (run.events("flops")[0]["per_sample"] for run in runs)
    assert once == again > 0
