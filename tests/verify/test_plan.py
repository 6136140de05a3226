"""The gradients of a plan beside those of one rank: equal ones, and ones that were made wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hvdtrain.config.parse import parse_argv, task_spec
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.plan import shards
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.task.base import load_task_function
from hvdtrain.verify.plan import Compared, PlanCheck, compare_gradients, for_plan, small_copy
from tests.support.divided_models import DIVIDED
from tests.support.thread_comm import ThreadComm, on_ranks


def _compare(*options: str) -> list[Compared]:
    def body(comm: ThreadComm) -> list[Compared]:
        function = load_task_function(task_spec([*DIVIDED, *options]))
        run = for_plan(parse_argv([*DIVIDED, *options], function))
        info = RankInfo("threads", comm.rank, comm.size, comm.rank, comm.size, folder=Path.cwd())
        return compare_gradients(run, partial(function, **run.task_args), comm, info)

    found = on_ranks(2, body)
    assert found[0] == found[1]
    return found[0]


def test_equal_gradients_of_divided_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_CHUNK", shards._CHUNK)  # which the task changes
    whole, found = _compare(), _compare("--parallel.shard=gradients", "--parallel.bucket_mib=0.02", "--elements=true")
    assert not any(each.wrong for each in found)
    assert {e.parameter: e.norm for e in found} == pytest.approx({e.parameter: e.norm for e in whole})


@pytest.mark.parametrize("options", [(), ("--parallel.shard=gradients",), ("--parallel.compression=fp16",)])
def test_equal_gradients(options: tuple[str, ...]) -> None:
    """In fp32, whatever the options say."""
    found = _compare(*options)
    assert len(found) > 20 and not any(each.wrong for each in found)
    check = PlanCheck("a model", 2, found)
    assert not check.wrong and check.to_text().endswith("the gradients are equal")


def _spoil(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Tensor], Any], ranks: Sequence[int]) -> None:
    """Change a parameter's gradient on some ranks, at the end of its exchange."""
    finish = InAllCopies.finish

    def wrong(self: InAllCopies) -> list[Tensor]:
        found = finish(self)
        own = dict(self.reducer.named)[name]
        assert own.grad is not None
        if self.reducer.comm.rank in ranks:
            spoil(own.grad)
        return found

    monkeypatch.setattr(InAllCopies, "finish", wrong)


@pytest.mark.parametrize(
    ("factor", "text"), [(2.0, "2 times as large"), (0.0, "the gradient is missing"), (0.5, "0.5 times as large")]
)
def test_a_wrong_factor_is_told(factor: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    _spoil(monkeypatch, name, lambda grad: grad.mul_(factor), (0, 1))
    (each,) = [each for each in _compare() if each.wrong]
    assert each.parameter == name and text in each.wrong
    lines = PlanCheck("a model", 2, [each]).to_text().splitlines()
    assert lines[1].startswith(f"WRONG: {name}: ") and lines[-1] == "the gradients differ"


def test_a_wrong_part_on_one_copy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, "lm_head.weight", lambda grad: grad[0].zero_(), (1,))
    (each,) = [each for each in _compare() if each.wrong]
    assert each.parameter == "lm_head.weight" and "differs by" in each.wrong


def test_a_parameter_without_gradient_proves_nothing() -> None:
    check = PlanCheck("a model", 2, [Compared("never", 0.0, 1.0, 0.0), Compared("a", 1e-7, 1.0, 1.0)])
    assert "1 have no gradient in this step, which proves nothing: never" in check.to_text() and not check.wrong


@pytest.mark.parametrize("preset", ["small", "671b"])
def test_a_small_copy_has_the_same_modules_heads_and_experts(preset: str) -> None:
    from transformers import AutoModelForCausalLM

    from hvdtrain.task.text_config import preset_config

    whole = preset_config(preset, vocabulary=1000, positions=64)
    small = small_copy(whole, 512)
    assert (small.num_attention_heads, small.n_routed_experts) == (whole.num_attention_heads, whole.n_routed_experts)
    model = AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < 50e6
    kinds = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    assert {"q_b_proj", "kv_b_proj", "experts", "shared_experts", "gate"} <= kinds
