"""Blocks compiled one by one: the same numbers, and gradients that come while backward still runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.engine.blocks import blocks
from hvdtrain.errors import ConfigError
from hvdtrain.training.loop.bf16_weights import Bf16Weights
from hvdtrain.training.loop.blocks import compile_blocks
from tests.support.gallery import Recorded
from tests.support.stack import Stack

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what it imports while compiling


Graphs = list[torch.fx.GraphModule]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.body = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.body(x)
        return out


class Times(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.factor
        return out


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """What was compiled; it is run as it is, so no C++ compiler is needed. Limits are those of torch."""
    found: Graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield found
    torch._dynamo.reset()


def test_blocks_are_the_items_of_the_outermost_lists() -> None:
    model = Model()
    assert blocks(model) == [*model.layers, model.body[1]]
    assert blocks(nn.Sequential(model, model)) == [model]


def test_a_model_without_blocks_is_named() -> None:
    with pytest.raises(ConfigError, match="no blocks") as caught:
        compile_blocks(nn.Linear(1, 1))
    assert caught.value.found == "Linear"


def test_each_of_many_unlike_blocks_is_compiled(graphs: Graphs) -> None:
    model = nn.Sequential(*(Times(factor) for factor in range(1, 13)))
    compile_blocks(model)
    with torch.no_grad():  # an evaluation first, as in a run
        model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    assert len(graphs) == 2 * 12


@pytest.mark.parametrize("without", [False, True])
def test_hooks_of_blocks_may_run_outside_of_compiled_code(graphs: Graphs, without: bool) -> None:
    block = Times(3)
    compile_blocks(nn.Sequential(block), without_hooks=without)
    compiling: list[bool] = []
    block.register_forward_pre_hook(lambda *_: compiling.append(torch.compiler.is_compiling()))
    block(torch.ones(1, 4))
    assert len(graphs) == 1 and compiling == [not without]


@pytest.mark.parametrize(
    "block",
    [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 8)],
    ids=lambda block: type(block).__name__,
)
def test_blocks_of_a_class_of_torch_are_compiled(graphs: Graphs, block: nn.Module) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    x = torch.randn(3, 2, 8)
    expected = block(x)
    names = model.state_dict().keys()
    compile_blocks(model)
    torch.testing.assert_close(block(x), expected)
    assert len(graphs) == 1
    assert model.state_dict().keys() == names


def test_blocks_are_not_compiled_again_for_new_bf16_copies_of_weights(graphs: Graphs) -> None:
    model = Stack(checkpoints=False, statistics=False, dropout=0.0, again=False)
    weights = Bf16Weights(model)
    compile_blocks(model)
    counts = []
    for _ in range(3):
        with weights():
            model(torch.arange(12).view(2, 6)).sum().backward()
        counts.append(len(graphs))
    assert counts[0] > 0 and counts == counts[:1] * 3


def _task(block: nn.Module, width: int, held_out: int = 0, **more: Any) -> Task:
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    data, held = (torch.utils.data.TensorDataset(torch.ones(count, width)) for count in (8, held_out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Task(model, lambda _, batch: (block(batch[0]).sum(), 1), data, held, optimizer=optimizer, **more)


@pytest.mark.parametrize(("held_out", "remainder"), [(6, 0), (8, 0), (2, 0), (6, 2)])
def test_a_smaller_batch_of_an_evaluation_does_not_make_code_for_any_size(
    held_out: int, remainder: int, graphs: Graphs, trained: Callable[..., Recorded]
) -> None:
    sizes: set[int] = set()
    block = nn.Linear(4, 4)
    block.register_forward_pre_hook(lambda _, given: None if block.training else sizes.add(len(given[0])))
    options = ("--train.compile=true", "--train.steps=2", f"--train.global_batch={3 + remainder}")
    trained("one", *options, "--train.micro_batch=3", size=1, build=lambda rank: _task(block, 4, held_out))
    assert sizes == {min(3, held_out), held_out % 3 or 3}
    inputs = [node.meta["example_value"] for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"]
    shapes = [tuple(each.shape) for each in inputs if isinstance(each, Tensor)]
    # A smaller micro-batch of training still does.
    assert shapes and all(type(length) is int for shape in shapes for length in shape) is not bool(remainder)


def test_compiled_blocks_give_the_same_gradients_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass of all blocks as one graph would give them at its end. No C++ compiler is needed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    compiled = copy.deepcopy(plain := Model())
    assert compile_blocks(compiled) == 4
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    order: list[str] = []
    for name, parameter in compiled.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))  # type: ignore[no-untyped-call,misc]
    compiled.layers[1].register_full_backward_pre_hook(lambda module, grads: order.append("backward of layers.1"))
    x = torch.randn(5, 4)
    for model in (plain, compiled):
        model(x).pow(2).sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch._dynamo.reset()
    reached = order.index("backward of layers.1")
    assert {"layers.2.0.weight", "body.1.weight"} <= set(order[:reached]), "gradients of later blocks were there before"
    assert {"layers.0.0.weight", "embed.weight"} <= set(order[reached:])
