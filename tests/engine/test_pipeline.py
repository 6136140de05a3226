"""What can be a stage of a pipeline, what each rank holds of it, and the order of its passes. (Training: the laws.)"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.solo import ImaginedComm, imagined_ranks
from hvdtrain.engine.blocks import blocks
from hvdtrain.engine.make import make_engine
from hvdtrain.engine.schedule import PipelineSchedule, with_stages
from hvdtrain.engine.stage import Stage
from hvdtrain.engine.stages import EndOfStage, Pass, _divide_evenly, first_blocks, order_of_passes
from hvdtrain.errors import ConfigError, HvdtrainError, TaskError
from hvdtrain.plan.plan import Plan
from hvdtrain.state.divided import (
    OnStages,
    copy_of,
    is_divided,
    local,
    place_of,
    ranks_with_rows,
    share_of,
    shares,
    take_rows,
)
from hvdtrain.task.text_config import preset_config

PP2, CPU = Dimensions(pp=2), torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    """Embedding, blocks that get what `given` makes of the ids and the embeddings, norm and head."""

    def __init__(self, given: Callable[[Tensor, Tensor], tuple[Any, ...]] = lambda ids, x: (), blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.given = nn.Embedding(5, 3), given
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        given = self.given(ids, x)
        for block in self.blocks:
            x = block(x, *given)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with imagined_ranks(4):
        yield


ECHO: Any = SimpleNamespace(send=lambda *_: None, receive=lambda like, _: torch.ones_like(like))
"""A link to other stages whose tensors are ones."""


def _stage(model: nn.Module, rank: int = 0, size: int = 2, chunks: int = 1, link: Any = None) -> Stage:
    stage = Stage(model, ImaginedComm(size, rank=rank), replace(PP2, virtual_stages=chunks), CPU)
    stage._unchecked = set(range(chunks)) if rank else set()  # as in a real job
    if link is not None:
        stage._links = dict.fromkeys(stage._links, link)
    return stage


def _changed(change: Callable[[Any], object], blocks: int = 2) -> Any:
    model = Model(blocks=blocks)
    change(model)
    return model


def _tied() -> Any:
    return _changed(lambda model: setattr(model.head, "weight", model.embedding.weight))


CONFIG = SimpleNamespace(to_dict=lambda: {"layerdrop": 0.5, "dropout": 0.1})


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize(
    ("build", "what", "next_step"),
    [
        (lambda: nn.Linear(2, 2), "no blocks to divide", "leave out --parallel.pp"),
        (lambda: Model(blocks=1), r"has 1 block\(s\)", "--parallel.pp 1 or fewer"),
        (lambda: Model(blocks=3), r"has 3 block\(s\)", "--parallel.virtual_stages 1"),
        (
            lambda: _changed(lambda m: setattr(m.blocks[1].linear, "weight", m.blocks[0].linear.weight)),
            "blocks.0.linear.weight and blocks.1.linear.weight",
            "another model",
        ),
        (lambda: _changed(lambda m: setattr(m, "config", CONFIG)), "config.layerdrop", "leave out"),
        (lambda: _changed(lambda m: setattr(m.head, "scale", nn.Parameter(torch.ones(())))), "head.scale", "leave out"),
        (lambda: _changed(lambda m: setattr(m, "bn", nn.BatchNorm1d(3))), "running statistics, which bn", "leave out"),
        (Projected, "projection.weight", "leave out"),
    ],
)
def test_a_model_without_stages_is_refused(build: Callable[[], nn.Module], what: str, next_step: str) -> None:
    model, dimensions = build(), replace(PP2, virtual_stages=2 if "virtual" in next_step else 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=what) as caught, imagined_ranks(2, 0):
        make_engine(optimizer, model, ImaginedComm(2), Plan(dimensions=dimensions))
    assert next_step in str(caught.value.next_step)


def test_a_stage_before_the_last_one_has_no_metrics() -> None:
    metrics = lambda model, batch: {"sum": (model(batch).sum(), 1.0), "auc": (batch,)}  # noqa: E731
    for rank, expected in ((0, {"auc": ()}), (1, {"sum", "auc"})):
        model = Model()
        task = Task(model, _loss, [1], metrics=metrics, metric_objects={"auc": object()})  # type: ignore[dict-item]
        found = with_stages(task, _stage(model, rank, link=ECHO)).metrics
        assert found is not None
        with torch.no_grad():
            assert {*found(model, torch.tensor([1, 2]))} == {*expected}


def test_a_pass_runs_the_model_once() -> None:
    model = Model()
    task = Task(model, lambda model, batch: _loss(model, model(batch).argmax(dim=-1)), [1])
    task = with_stages(task, _stage(model, 1, link=ECHO))
    for message in ("does not support this task", "does not support a task that runs the blocks"):
        with pytest.raises(TaskError, match=message), torch.no_grad():
            task.loss(model, torch.tensor([1, 2]))
        model.embedding.forward = lambda ids: torch.zeros(len(ids), 3)  # type: ignore[method-assign]


def test_an_embedding_after_the_blocks_is_refused() -> None:
    """Unless the last stage has it: else it would be zeros."""

    class After(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.embedding(ids).sum(dim=-1, keepdim=True)

    for takes in (False, True):
        model = After()
        model.takes_embeddings = takes  # type: ignore[assignment]
        task = _staged(model, _stage(model, 1, link=ECHO))
        refused = pytest.raises(TaskError, match="it uses an embedding after the blocks")
        with contextlib.nullcontext() if takes else refused, torch.no_grad():
            task.loss(model, torch.tensor([1, 2]))


def test_a_loss_without_a_gradient_is_an_error() -> None:
    stage = _stage(Model(), 1)
    stage.begin(lambda: None)
    with pytest.raises(RuntimeError, match="does not require grad"):
        stage.backward(torch.ones(()))


def test_embeddings_that_are_used_after_the_blocks_are_at_both_ends() -> None:
    tied, after = _tied(), Model()
    after.norm.takes_embeddings = True  # type: ignore[assignment]
    for model, expected in ((Model(), (0,)), (tied, (0, 1)), (after, (0, 1))):
        stage = _stage(model, 1)
        assert stage._stages_of[model.embedding.weight] == expected and stage._stages_of[model.head.bias] == (1,)
        embedded = model.embedding(torch.tensor([1, 2]))
        assert torch.equal(embedded, model.embedding.weight[1:3]) == (len(expected) == 2)


def test_random_numbers_continue_those_of_the_stage_before() -> None:
    model = _changed(lambda model: setattr(model, "dropout", nn.Dropout(0.5)))
    sent: list[Tensor] = []
    onward: Any = SimpleNamespace(send=lambda tensor, _: sent.append(tensor), receive=lambda like, _: sent.pop(0))
    stages = [_stage(copy.deepcopy(model), rank, link=onward) for rank in (0, 1)]
    drawn = []
    for number, stage in enumerate(stages):
        stage._drops = True
        stage._passes[0, 0] = {}
        torch.manual_seed(7)
        if not number:
            torch.rand(3)
        stage.start()
        with contextlib.suppress(EndOfStage):
            stage._model(torch.tensor([1, 2]))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn) and not sent
    for stage in stages:
        stage._model.eval()
        stage.start()
        with torch.no_grad(), contextlib.suppress(EndOfStage):
            stage._model(torch.tensor([1, 2]))
        assert len(sent) == 1 - stage._number  # the output alone


def _half(ids: Tensor, x: Tensor) -> Tensor:
    return x.detach()[:1] * 0.5


@pytest.mark.parametrize(
    ("given", "rank", "what"),
    [
        (lambda ids, x: (x * 2,), 0, "Block: it takes two tensors with gradients"),
        (lambda ids, x: ({"skip": [_half(ids, x)]},), 1, "values that depend on parameters of earlier stages"),
    ],
)
def test_a_block_gets_nothing_else_from_earlier_stages(given: Any, rank: int, what: str) -> None:
    model = Model(given)
    stage = _stage(model, rank)
    call = partial(_staged(model, stage).loss, model, torch.tensor([1, 2]))
    with pytest.raises(TaskError, match=what):
        stage.begin(call)
        call()


def test_what_follows_from_the_ids_is_the_same_on_all_stages() -> None:
    model = Model(lambda ids, x: (torch.arange(len(ids)), ids.to(x)))
    stage = _stage(model, 1)
    call = partial(_staged(model, stage).loss, model, torch.tensor([1, 2]))
    seen, after = [], []
    model.embedding.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.head.register_forward_hook(lambda module, inputs, output: after.append(output))
    stage.begin(call)
    assert len(seen) == 2 and not after  # one dry pass for each value of the embeddings, once, up to the last block
    stage.begin(call)
    assert len(seen) == 2


def _loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return model(batch).sum(), float(len(batch))


def _staged(model: nn.Module, stage: Stage) -> Task:
    return with_stages(Task(model, _loss, [1]), stage)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: torch.cat([x, x], dim=-1), r"\(2, 6\) torch.float32"),
        (lambda x: x.double(), r"\(2, 3\) torch.float64"),
        (lambda x: (x, x), "tuple"),
    ],
)
def test_a_block_passes_on_what_it_gets(change: Callable[[Tensor], Any], found: str) -> None:
    model = _changed(lambda model: setattr(model.blocks[0], "forward", change))
    _stage(model).begin(lambda: None)
    with pytest.raises(HvdtrainError, match="change the form") as caught:
        model(torch.tensor([1, 2]))
    assert caught.match(found)


def test_the_first_argument_is_what_is_passed_on() -> None:
    model = Model()
    _stage(model)
    with pytest.raises(TaskError, match="does not support Block"):
        model.blocks[0](x=torch.ones(2, 3))


def _finished(stages: int, chunks: int, micro_batches: int, transfer: float = 0.0) -> tuple[float, int]:
    """Return when all ranks have ended, and the most micro-batches that one keeps.

    A forward pass takes 1, a backward pass 2.
    """
    waiting = [deque(order_of_passes(rank, stages, chunks, micro_batches)) for rank in range(stages)]
    ends: dict[tuple[Pass, int, int], float] = {}  # of a pass of a micro-batch in a virtual stage, of all ranks
    now, kept, most = [0.0] * stages, [0] * stages, 0
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, passes in enumerate(waiting):
            while passes:
                kind, number, chunk = passes[0]
                virtual = chunk * stages + rank
                assert kind is Pass.FORWARD or (Pass.FORWARD, number, virtual) in ends
                before_it = (kind, number, virtual - 1 if kind is Pass.FORWARD else virtual + 1)
                if 0 <= before_it[2] < stages * chunks:
                    if before_it not in ends:
                        break
                    now[rank] = max(now[rank], ends[before_it] + transfer)
                passes.popleft()
                now[rank] += 2 if kind is Pass.BACKWARD else 1
                assert (kind, number, virtual) not in ends
                ends[kind, number, virtual] = now[rank]
                kept[rank] += 1 if kind is Pass.FORWARD else -1
                most = max(most, kept[rank])
        assert sum(map(len, waiting)) < before, "ranks wait for each other"
    assert len(ends) == 2 * stages * chunks * micro_batches and not any(kept)
    return max(now), most


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (3, 3), (4, 4), (4, 16)])
def test_stages_wait_less_with_more_virtual_ones(stages: int, chunks: int, micro_batches: int) -> None:
    """Of transfers, only those of the first micro-batch onward and of the last one back are waited for."""
    took, most = _finished(stages, chunks, micro_batches)
    assert took == 3 * (micro_batches * chunks + stages - 1)
    if chunks > 1 and micro_batches == 4 * stages:
        slower, _ = _finished(stages, chunks, micro_batches, 0.2)
        assert slower == pytest.approx(took + 0.2 * 2 * (stages * chunks - 1))
    assert most <= (stages if chunks == 1 else stages * (chunks + 1) - 1)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 2, 3), (3, 2, 4), (4, 3, 5), (2, 3, 1), (9, 1, 4)])
def test_any_number_of_micro_batches_ends(stages: int, chunks: int, micro_batches: int) -> None:
    """Not a multiple of the stages: all forward passes come first."""
    assert _finished(stages, chunks, micro_batches)[1] == chunks * micro_batches


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pass_is_run_once_for_each_virtual_stage(chunks: int) -> None:
    """A micro-batch is taken when its first pass begins; gradients are complete with the last of a virtual stage."""
    done, taken = list[tuple[str, int, int | None, int]](), list[int]()
    stage = _stage(Model(blocks=4), 0, 2, chunks)
    schedule = PipelineSchedule(stage)
    schedule.begin(4)

    def forward(number: int) -> Callable[[], None]:
        done.append(("F", number, stage.chunk, len(taken)))
        return lambda: done.append(("B", number, stage.chunk, schedule.left))

    def passes() -> Iterator[Callable[[], Callable[[], None]]]:
        for number in range(4):
            taken.append(number)
            yield partial(forward, number)

    schedule.run(passes())
    expected = [(kind.name[0], number, chunk) for kind, number, chunk in stage.order(4)]
    assert [each[:3] for each in done] == expected and stage.chunk is None
    for kind, number, chunk, count in done:
        assert count == (4 - number if kind != "F" else number + 1 if not chunk else count)


def test_ranks_have_every_other_group_of_blocks() -> None:
    model = Model(blocks=4)
    stage = _stage(model, 1, 2, 2)
    stages = [stage._stages_of[block.linear.weight] for block in model.blocks]  # type: ignore[union-attr,index]
    assert stages == [(0,), (1,), (0,), (1,)] and stage._stages_of[model.head.bias] == (1,)
    sent: list[tuple[str, int]] = []
    for name in stage._links:
        stage._links[name] = cast("Any", SimpleNamespace(
            send=lambda _, to, name=name: sent.append((name, to)), receive=lambda like, to: torch.full_like(like, to)
        ))  # fmt: skip
    seen: list[int] = []
    for number, block in enumerate(model.blocks):
        block.linear.register_forward_pre_hook(lambda *_, number=number: seen.append(number))  # type: ignore[union-attr,operator]
    found = _staged(model, stage)
    with torch.no_grad():
        loss, weight = found.loss(model, torch.tensor([1, 2]))  # an evaluation runs both
    assert seen == [1, 3] and weight == 2 and loss != 0 and sent == [("onward/around", 0)] and stage.chunk is None


def test_evaluations_draw_the_same_numbers_in_each_virtual_stage() -> None:
    model = Model(blocks=4)
    stage = _stage(model, 0, 2, 2, link=ECHO)
    drawn: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        drawn.append(torch.rand(2))
        return _loss(model, batch)

    with torch.no_grad():
        with_stages(Task(model, loss, [1]), stage).loss(model, torch.tensor([1, 2]))
    assert len(drawn) == 2 and torch.equal(*drawn)


def _parameter(stage: int, own: int) -> nn.Parameter:
    value = torch.arange(6.0).view(3, 2)
    return OnStages((3, 2), (stage,), ((0, 2), (1, 3))).of(value if stage == own else value[:0])


def test_ranks_of_two_stages_hold_a_parameter() -> None:
    """They are one share; those between have none of it."""
    value, ranks = torch.ones(3, 2), ((0, 1), (2, 3), (4, 5))
    here, elsewhere = (OnStages((3, 2), (0, 2), ranks).of(held) for held in (value, value[:0]))
    assert place_of(here).ranks == ranks_with_rows(elsewhere) == (0, 1, 4, 5)
    assert place_of(elsewhere).ranks == (2, 3)
    found = shares(here)
    assert [share_of(rank, found) for rank in range(6)] == [0, 0, 1, 1, 0, 0] and shares(elsewhere) == found
    assert shares(OnStages((3, 2), (0, 1), ranks[:2]).of(value)) == ()


def test_a_parameter_is_whole_on_its_stage_and_nothing_elsewhere() -> None:
    here, elsewhere = _parameter(1, 1), _parameter(1, 0)
    assert is_divided(here) and is_divided(elsewhere)
    assert (place_of(here).offset, place_of(here).ranks) == ((0, 0), (1, 3))
    assert (place_of(elsewhere).offset, place_of(elsewhere).ranks) == ((3, 0), (0, 2))
    assert place_of(here).shape == place_of(elsewhere).shape == (3, 2)
    assert ranks_with_rows(here) == ranks_with_rows(elsewhere) == (1, 3)
    whole = torch.ones(3, 2)
    for parameter, length in ((here, 3), (elsewhere, 0)):
        taken, copied = take_rows(whole, parameter), copy_of(parameter)
        assert len(local(taken)) == len(local(copied)) == length and is_divided(taken) and is_divided(copied)
        assert type(local(parameter)) is Tensor and not local(parameter).requires_grad
    assert torch.equal(local(copy_of(here)), local(here)) and local(copy_of(here)).data_ptr() != here.data_ptr()


@pytest.mark.parametrize(
    ("works", "count", "expected"),
    [
        ([5, 2, 1, 6, 2], 3, [0, 2, 4, 5]),  # the smallest sum of squares has a larger stage
        ([5, 2, 2, 3], 3, [0, 1, 3, 4]),  # 5, 2, 5 would be as good but for the others
    ],
)
def test_stages_have_about_as_much_work(works: list[float], count: int, expected: list[int]) -> None:
    assert _divide_evenly(works, count) == expected


def test_no_division_has_a_smaller_largest_stage() -> None:
    generator = random.Random(3)
    for _ in range(30):
        works = [generator.choice([0.0, 1.0, 2.0, 7.0]) for _ in range(8)]
        count = generator.randint(1, 8)
        found = _divide_evenly(works, count)
        assert found[0] == 0 and found[-1] == 8 and len(found) == count + 1 and sorted(set(found)) == found
        every = (each for each in combinations(range(1, 8), count - 1))
        largest = [max(sum(works[a:b]) for a, b in pairwise([0, *cuts, 8])) for cuts in every]
        assert max(sum(works[a:b]) for a, b in pairwise(found)) == min(largest)


@pytest.mark.parametrize(("vocabulary", "expected"), [(64, [0, 2, 4]), (8192, [0, 3, 4])])
def test_the_head_is_work_of_the_last_stage(vocabulary: int, expected: list[int]) -> None:
    transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            preset_config("small", vocabulary=vocabulary, positions=64)
        )
    assert first_blocks(model, blocks(model), 2) == expected


def test_blocks_of_no_library_are_divided_by_their_matrices() -> None:
    wide, narrow = nn.Linear(40, 40), [nn.Linear(4, 40), nn.Linear(40, 4)]
    model = nn.Sequential(nn.Embedding(1000, 40), nn.ModuleList([wide, *narrow, *narrow]))
    assert first_blocks(model, [wide, *narrow, *narrow], 2) == [0, 1, 5]


def test_a_token_is_multiplied_by_the_experts_that_it_chooses() -> None:
    """Two of 64 are as much as a matrix of half the size; vectors are no work."""
    experts = {"all": nn.Parameter(torch.zeros(64, 10, 10)), "scales": nn.Parameter(torch.zeros(9000))}
    parts: list[nn.Module] = [nn.ParameterDict(experts), *(nn.Linear(20, 20) for _ in range(3))]
    model = nn.ModuleList(parts)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_experts_per_tok=2))  # type: ignore[assignment]
    assert first_blocks(model, parts, 2) == [0, 2, 4]
    for other in (None, SimpleNamespace(width=10)):  # of a model of no library
        model.config = other  # type: ignore[assignment]
        assert first_blocks(model, parts, 2) == [0, 1, 4]
