"""How a comparison is shown, and its conditions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from tests.support.journals import FakeRun


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Three runs with long names; the second has a loss of 1.5, the others of 1."""
    made = []
    for number, (loss, price) in enumerate(((1.0, 2.0), (1.5, 2.0), (1.0, None))):
        options = {"observe": {"price_per_hour": price}, "data": {"text": f"{'x' * 90}{number}"}}
        run = FakeRun(tmp_path / f"{'a-long-name-' * 9}{number}", **options)
        losses = [loss + 0.001 * (step * (3 + number) % 7) for step in range(200)]
        run.start(losses, step_s=1000.0, evaluations={200: {"loss": loss, "a_metric_with_a_long_name": 1234567.0}})
        made.append(str(run.folder))
    return made


def test_the_text_shows_differences_costs_and_options(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("a (base)", "held-out loss", "+0.5*", "money", "--data.text"))


@pytest.mark.parametrize(
    ("condition", "code", "shown"),
    [
        ("loss > 1.01 * base", 1, "b: loss is 1.503"),
        ("loss > 1.6 * base", 0, ""),
        ("loss > base and heldout_loss_by_seconds > 1.2", 1, "b: loss is"),
        ("loss > base and heldout_loss > 1.6", 0, ""),
        ("device_hours > 2 * base", 0, ""),
        ("money > base", 2, "this run has no figure money"),
        ("__import__('os')", 2, "--fail_if"),
    ],
)
def test_conditions(runs: list[str], condition: str, code: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--fail_if", condition]) == code
    assert shown in capsys.readouterr().err


def test_a_run_without_a_finite_loss_passes_no_condition(tmp_path: Path) -> None:
    a = FakeRun(tmp_path / "a").start([1.0] * 40)
    b = FakeRun(tmp_path / "b").start([None] * 40)
    for condition in ("loss > 1.01 * base", "loss < 9"):
        assert main(["compare", str(a.folder), str(b.folder), "--fail_if", condition]) == 2


def test_json_has_all(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["loss"] for each in found["figures"]] == pytest.approx([1.003, 1.503, 1.003], abs=1e-3)
    assert "money" in found["figures"][0] and "money" not in found["figures"][2]
    single = next(row for row in found["rows"] if row["figure"] == "heldout_loss")
    assert single["differences"][1]["low"] is None  # no interval
    assert found["columns"] == [[run] for run in runs]
