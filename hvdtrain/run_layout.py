"""The paths of all files in a run folder, and its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TimelineLayout:
    """Paths in a folder of traces, such as ``RUN/timeline``."""

    # Patterns of the files of spans, of Horovod's Timelines and of torch.profiler.
    SPANS = "spans-rank-*.json"
    HOROVOD = "horovod-steps-*.json"
    TORCH = "torch-steps-*.json"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = folder / "steps.jsonl"  # step stamps of all ranks
        self.gradients = folder / "gradients.json"  # when backward has each gradient ready
        self.link_probe = folder / "probe.json"  # measured durations of all-reduces, for predictions
        self.report_page = folder / "report.html"  # the analysis of the run, for a browser
        self.report_data = folder / "report.json"  # the same as JSON

    def spans(self, rank: int) -> Path:
        """Return the file of a rank's spans."""
        return self.folder / f"spans-rank-{rank}.json"

    def horovod(self, first: int, last: int | str) -> Path:
        """Return the file of Horovod's Timeline of steps `first` to `last`."""
        return self.folder / f"horovod-steps-{first}-{last}.json"

    def torch_profile(self, first: int, last: int, rank: int) -> Path:
        """Return the file of a rank's torch.profiler trace of steps `first` to `last`."""
        return self.folder / f"torch-steps-{first}-{last}-rank-{rank}.json"


class RunLayout:
    """Paths in a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"  # the resolved options
        self.identity = folder / ".identity"  # the options that distinguish this run from others
        self.journal = folder / "journal.jsonl"  # one line a step and one line an event
        self.checkpoints = folder / "checkpoints"
        self.timeline = TimelineLayout(folder / "timeline")
        self.ledger = folder / "ledger"  # folder of the samples that each rank has drawn
        self.tensorboard = folder / "tensorboard"
        self.failure_text = folder / "failure.txt"  # the failure card of the last start
        self.failure_json = folder / "failure.json"  # the same as JSON
        self.old_failures = folder / "failures"  # folder of the cards of earlier starts
        self.ranks = folder / ".ranks"  # folder for messages between ranks about failures
        self.lock = folder / ".lock"  # locked while a job uses the run folder
        self.lease = folder / ".lease"  # a claim on the run folder where the file system has no locks
        self.job = folder / ".job"  # name of the job that claimed the run folder last

    @property
    def is_run(self) -> bool:
        """Whether a run has written its journal there."""
        return self.journal.is_file()

    def read_config(self) -> dict[str, Any]:
        """Read the resolved options. Errors: ConfigError if the file is missing or damaged."""
        from hvdtrain.yaml_file import read_yaml  # PyYAML takes 30 ms

        return read_yaml(self.config)
