"""`--train.verify_every`: a bit that flips on a rank is found before the update, and no step is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.errors import ConfigError, DriftError
from hvdtrain.training.diagnostics.second_rank import SecondRank
from tests.laws.test_laws import UNOBSERVED, check_same, record
from tests.laws.test_same_bits import RAGGED
from tests.support.flips import CHECKED, KINDS, Fault, anywhere, make_task, train_flipped
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "shard"), [(2, "none"), (4, "none"), (3, "optimizer")])
@pytest.mark.some(3)
def test_a_flipped_bit_is_found_and_changes_nothing(kind: str, size: int, shard: str, tmp_path: Path) -> None:
    options, wrong = (*CHECKED, f"--parallel.shard={shard}"), size - 1
    clean = train_flipped(tmp_path / "clean", *options[:1], options[-1], size=size)
    found = train_flipped(tmp_path / "found", *options, size=size, plan=lambda step: (wrong, kind if step == 3 else ""))
    event, *others = found.events("wrong_rank")
    assert (event["rank"], event["at_step"]) == (wrong, 3) and event["host"] and event["cores"]
    assert [(other["rank"], other["what"], other["tensor"]) for other in others] == (
        [(wrong, "parameters", "3.weight")] if kind == "parameter" else []
    )
    assert found.losses() == clean.losses()
    check_same(found.state(), clean.state(), exchange=None)


@pytest.mark.parametrize(
    "options",
    [("--checkpoints=true", "--precision=bf16"), ("--precision=bf16-weights",), ("--precision=fp16", "--again=true")],
    ids=" ".join,
)
def test_equal_work_raises_no_alarm(options: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks have two micro-batches, one is smaller; weights are tied, recomputed, rounded."""
    found = record(tmp_path, *RAGGED, *options, "--train.verify_every=1", size=3)
    assert not found.events("wrong_rank")
    assert found.losses() == record(tmp_path / "one", *RAGGED, *options).losses()


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_hundreds_of_flipped_bits_cost_no_step(size: int, tmp_path: Path) -> None:
    steps, plan = 100, anywhere(size)
    clean = train_flipped(tmp_path / "clean", *CHECKED, size=size, steps=steps)
    assert not clean.events("wrong_rank")
    found = train_flipped(tmp_path / "found", *CHECKED, size=size, steps=steps, plan=plan)
    assert found.losses() == clean.losses()
    check_same(found.state(), clean.state(), exchange=None)
    named = {(event["at_step"], event["rank"]) for event in found.events("wrong_rank")}
    missed = [plan(step)[1] for step in range(1, steps) if not {(s, plan(step)[0]) for s in (step, step + 1)} & named]
    assert len(missed) <= 5 and set(missed) <= {"activation"}, "a last bit may be rounded away"


class _Always(Fault):
    def is_now(self, kind: str) -> bool:
        return kind == "gradient" and self.rank == 1


@pytest.mark.parametrize(
    ("size", "text"),
    [(2, "ranks 0, 1 have different gradient"), (3, "rank 1 computed a wrong gradient in step 1, and a rank did")],
)
def test_a_rank_that_is_always_wrong_ends_training(size: int, text: str, tmp_path: Path) -> None:
    """Of two ranks, it does not contradict itself."""
    build = partial(make_task, plan=lambda step: (1, "gradient"), fault=_Always)
    with pytest.raises(DriftError, match=text):
        train_on_threads(*UNOBSERVED, *CHECKED, f"--run_dir={tmp_path / 'run'}", size=size, build=build)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [((1.0, 2.0, 1.0), 1), ((2.0, 1.0, 1.0), 0), ((1.0, 2.0, 3.0), None), ((1.0, 1.0, 2.0, 2.0), None)],
)
def test_the_copy_of_most_ranks_counts(values: tuple[float, ...], wrong: int | None) -> None:
    reported = list[int]()

    def body(comm: ThreadComm) -> tuple[list[Any], float]:
        told, model = list[Any](), nn.Linear(2, 1)
        nn.init.constant_(model.weight, values[comm.rank])
        nn.init.zeros_(model.bias)
        second = SecondRank(1, "a", lambda facts, text: told.append(facts["rank"]), reported.append)
        second._stepper = SimpleNamespace(  # type: ignore[assignment]
            comm=comm, model=model, spans=SimpleNamespace(step=3), device=torch.device("cpu")
        )
        if wrong is None:
            with pytest.raises(DriftError, match="is not known"):
                second._compare_parameters()
        else:
            second._compare_parameters()
        return told, model.weight.detach()[0, 0].item()

    kept = list(values) if wrong is None else [1.0] * len(values)
    assert on_ranks(len(values), body) == [([wrong], value) for value in kept]
    assert reported == ([] if wrong is None else [wrong]), "by one of the others"


def test_the_first_step_of_a_round_is_checked(tmp_path: Path) -> None:
    class First(Fault):
        def is_now(self, kind: str) -> bool:
            return (kind, self.rank, self.step, self.passes) == ("gradient", 1, 1, 1 + 1)

    found = train_flipped(tmp_path, *CHECKED[:1], "--train.verify_every=50", size=3, fault=First)
    assert [(event["rank"], event["at_step"]) for event in found.events("wrong_rank")] == [(1, 1)]


def test_what_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    for option, text in (("--train.balance_loss=0.1", "balance_loss"), ("--parallel.shard=gradients", "sum each pass")):
        with pytest.raises(ConfigError, match=text):
            train_flipped(tmp_path, *CHECKED, option, size=2)
    with pytest.raises(ConfigError, match="cannot repeat the bits") as refused:
        train_flipped(tmp_path, "--train.verify_every=3", size=2)
    assert "--train.reproducible bits" in str(refused.value)
