from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.observe.cost import Cost, cost_of, number, text
from hvdtrain.observe.past_journal import read_journal_starts
from tests.support.journals import FakeRun

HOUR = {"step_s": 1800.0}
"""Of two steps."""


def _cost(run: FakeRun) -> Cost:
    found = cost_of(read_journal_starts(run.folder / "journal.jsonl"))
    assert found is not None
    return found


def test_starts_are_summed_with_repeated_steps_and_without_the_time_between(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a", observe={"price_per_hour": 3.0})
    run.start([1.0, 1.0], **HOUR, joules=3.6e6, end="")
    run.now_s += 1e6
    run.start([1.0, 1.0], after=1, **HOUR, joules=1.8e6, devices=4)
    found = _cost(run)
    assert (found.starts, found.device_hours, found.money) == (2, 2 + 4, 18.0)
    assert found.energy_kwh == {"CPUs": pytest.approx(1.5)} and not found.unmeasured
    assert all(part in text(found) for part in ("18.00", "6.00 device-hours", "1.50 kWh"))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_between_rounds_the_devices_of_both_count(tmp_path: Path, before: int, after: int) -> None:
    run = FakeRun(tmp_path / "a").start([1.0, 1.0], **HOUR, end="", devices=before)
    run.now_s += 3600
    run.start([1.0, 1.0], after=2, **HOUR, devices=after, goes_on=True)
    assert _cost(run).device_hours == before + min(before, after) + after


def test_ranks_count_where_a_journal_names_no_devices(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a").start([1.0, 1.0], **HOUR, devices=None, size=5, energy=None)
    found = _cost(run)
    assert found.device_hours == 5 and found.all_kwh is None


def test_small_and_large_numbers() -> None:
    assert [number(value) for value in (0.0, 0.0000123, 0.5, 1234.5)] == ["0", "0.0000123", "0.500", "1,234"]


def test_without_a_price_in_each_start_there_is_no_sum_of_money(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a", observe={"price_per_hour": 3.0}).start([1.0, 1.0], **HOUR)
    run.config = {**run.config, "observe": {}}
    assert _cost(run.start([1.0], after=2)).money is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"energy": {"CPUs": "RAPL is for root only"}}, "RAPL is for root only"),
        ({"energy": {"GPUs": ""}}, "not in every start"),
        ({"energy": None}, "not in every start"),
        ({"failed": ["CPUs"]}, "failed"),
    ],
)
def test_a_part_that_one_start_did_not_measure_has_no_sum(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    run = FakeRun(tmp_path / "a")
    run.write({"step": 1, "time": 5.0, "loss": 1.0})
    assert cost_of(read_journal_starts(run.folder / "journal.jsonl")) is None, "without starts there is no cost"
    run.start([1.0], joules=5.0).start([1.0], after=1, joules=5.0, **facts)
    run.write({"event": "energy", "at_step": 1, "joules": {"CPUs": 5.0}, "time": run.now_s, **facts})
    found = _cost(run)
    assert "CPUs" not in found.energy_kwh and reason in found.unmeasured["CPUs"]
