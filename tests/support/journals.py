"""Run folders with journals as training writes them, without training; and what the journal of a run records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.observe.past_journal import journal_lines, read_steps

BEGIN_S = 1e9
FACTS = {
    "devices": 2,
    "machine": {"hosts": ["h"], "devices": {"CPU x": 2}},
    "versions": {"hvdtrain": "0.1.0", "torch": "2.13.0"},
    "energy": {"CPUs": ""},
}


class FakeRun:
    """A run in `folder` that writes its journal start by start; `options` are those of its config, by section."""

    def __init__(self, folder: Path, *, batch: int = 8, **options: Any) -> None:
        folder.mkdir(parents=True)
        self.folder, self.batch, self.now_s = folder, batch, BEGIN_S
        self.config = {"task": "image", "seed": 0, "run_dir": str(folder), "train": {"steps": 100}, **options}

    def write(self, *records: Mapping[str, Any]) -> None:
        with (self.folder / "journal.jsonl").open("a") as file:
            file.writelines(f"{json.dumps(record, separators=(',', ':'))}\n" for record in records)

    def start(
        self,
        losses: Sequence[float | None],
        *,
        after: int = 0,
        step_s: float = 0.5,
        evaluations: Mapping[int, Mapping[str, float | None]] | None = None,
        joules: float | None = None,
        end: str = "finished",
        **facts: Any,
    ) -> FakeRun:
        """Train a step for each loss, after step `after`; evaluations by step, with `loss` and metrics."""
        started = {"event": "started", "size": 2, "unit": "samples", **FACTS, "config": self.config}
        self.write({**started, "time": self.now_s, **facts})
        for step, loss in enumerate(losses, after + 1):
            self.now_s += step_s
            self.write({"step": step, "time": self.now_s, "loss": loss, "position": self.batch * step, "tokens": 1.0,
                        "step_s": step_s})  # fmt: skip
            if evaluations and step in evaluations:
                values = dict(evaluations[step])
                self.write({"event": "evaluation", "at_step": step, "loss": values.pop("loss"), "metrics": values,
                            "time": self.now_s})  # fmt: skip
        if joules is not None:
            self.write({"event": "energy", "at_step": 0, "joules": {"CPUs": joules}, "time": self.now_s})
        if end:
            self.write({"event": end, "at_step": after + len(losses), "time": self.now_s})
        return self


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All lines of a journal in order."""
    return list(journal_lines(path))


def read_events(run: Path | str, name: str) -> list[dict[str, Any]]:
    return [line for line in read_journal(Path(run, "journal.jsonl")) if line.get("event") == name]


def read_losses(run: Path | str) -> list[float]:
    """Return the loss of each step."""
    return [line["loss"] for line in read_steps(Path(run, "journal.jsonl")).values()]
