"""Runs as the trainer tells a TensorBoard sink of them, and what TensorBoard's own reader finds of them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from hvdtrain.observe.journal import Journal
from hvdtrain.observe.scalars import BANDS
from hvdtrain.observe.tensorboard import TensorBoard

BATCH = 16
CONFIG = {"seed": 7, "run_dir": "somewhere", "train": {"steps": 9, "global_batch": BATCH}, "data": {"text": "a|b*.md"}}
STARTED = {"event": "started", "size": 2, "parameters": 5, "unit": "words", "config": CONFIG, "time": 1e9}


def single(value: float) -> float:
    """The nearest value of single precision, which TensorBoard keeps scalars in."""
    return struct.unpack("f", struct.pack("f", value))[0]


def step_record(step: int, time: float, step_s: float = 0.5) -> dict[str, Any]:
    parts = {"data_s": 0.1, "copy_s": 0.05, "forward_s": 0.2, "backward_s": 0.3, "exposed_comm_s": 0.15}
    return {
        "step": step,
        "time": time,
        "loss": 5 / step + time % 1,
        "lr": 0.1 / step,
        "grad_norm": 1.0 + step,
        "position": BATCH * step,
        "tokens": 100.0 + step,
        "step_s": step_s,
        **{name: share * step_s for name, share in {**parts, "clip_s": 0.02, "optimizer_s": 0.08}.items()},
        "skipped": False,
    }


def read(folder: Path) -> Any:
    """An EventAccumulator that has read one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance=dict.fromkeys(("scalars", "tensors", "histograms"), 0)).Reload()


def series(folder: Path, tag: str) -> dict[int, float]:
    """Values by step; a step that stands there twice, or out of order, is an error."""
    points = read(folder).Scalars(tag)
    steps = [point.step for point in points]
    assert steps == sorted(set(steps)), f"{tag}: {steps}"
    return {point.step: point.value for point in points}


class Run:
    """A run in `folder` that is told to sink and journal as the trainer does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.journal = folder / "journal.jsonl"
        self.now = 1e9

    def folders(self) -> list[str]:
        """TensorBoard's runs."""
        losses = [f"{run}{axis}" for run in (".", "heldout") for axis in ("", "/by_samples", "/by_seconds")]
        return [*losses, *(f"step/{band}" for band in BANDS)]

    def everything(self, folder: str) -> dict[str, dict[int, float]]:
        """All series of one of them."""
        return {tag: series(self.folder / folder, tag) for tag in read(self.folder / folder).Tags()["scalars"]}

    def stretch(
        self,
        resumed: int | None,
        durations: list[float],
        *,
        save_every: int = 0,
        end: bool = True,
    ) -> None:
        """Train steps of these durations, after `resumed`; `end` closes the sink, a killed run does not."""
        journal, sink = Journal(self.journal, print), TensorBoard(self.folder, self.journal)

        def tell(**event: Any) -> None:
            journal.write(event)
            sink.write(event)

        tell(**STARTED)
        tell(event="warning", text="a damaged checkpoint", time=self.now)
        if resumed is not None:
            tell(event="resumed", step=resumed, position=BATCH * resumed, time=self.now)
        for step, step_s in enumerate(durations, (resumed or 0) + 1):
            self.now += step_s
            tell(**step_record(step, self.now, step_s))
            if save_every and step % save_every == 0:
                for event in ("evaluation", "checkpoint"):
                    tell(event=event, at_step=step, loss=9 / step, time=self.now)
        journal.close()
        if end:
            sink.close()
        else:
            for file in sink._files.values():  # as a kill leaves them: what waits for the next point is lost
                file.close()
