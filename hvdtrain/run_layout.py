"""The paths of all files in a run folder, and its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TimelineLayout:
    """Paths in a folder of traces, such as ``RUN/timeline``.

    Args:
        folder: that has the traces.

    Attributes:
        steps: step stamps of all ranks.
        gradients: when backward has each gradient ready.
        link_probe: measured durations of all-reduces, for predictions.
        report_page: the analysis of the run, for a browser.
        report_data: the same as JSON.
        window_request: the request of a command for a window of traces.
        window_answer: the answer of the run to it.
    """

    SPANS = "spans-rank-*.json"
    """Pattern of the files of spans."""
    HOROVOD = "horovod-steps-*.json"
    """Pattern of Horovod's Timelines."""
    TORCH = "torch-steps-*.json"
    """Pattern of the files of torch.profiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = folder / "steps.jsonl"
        self.gradients = folder / "gradients.json"
        self.link_probe = folder / "probe.json"
        self.report_page = folder / "report.html"
        self.report_data = folder / "report.json"
        self.window_request = folder / ".window-request.json"
        self.window_answer = folder / ".window-answer.json"

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
    """Paths in a run folder.

    Args:
        folder: of the run.

    Attributes:
        config: the resolved options.
        identity: the options that distinguish this run from others.
        journal: one line a step and one line an event.
        checkpoints: folder of the checkpoints.
        timeline: the traces.
        ledger: folder of the samples that each rank has drawn.
        tensorboard: folder of TensorBoard's files.
        failure_text: the failure card of the last start, as text.
        failure_json: the same as JSON.
        old_failures: folder of the cards of earlier starts.
        ranks: folder for messages between ranks about failures.
        lock: locked while a job uses the run folder.
        lease: a claim on the run folder where the file system has no locks.
        job: name of the job that claimed the run folder last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.identity = folder / ".identity"
        self.journal = folder / "journal.jsonl"
        self.checkpoints = folder / "checkpoints"
        self.timeline = TimelineLayout(folder / "timeline")
        self.ledger = folder / "ledger"
        self.tensorboard = folder / "tensorboard"
        self.failure_text = folder / "failure.txt"
        self.failure_json = folder / "failure.json"
        self.old_failures = folder / "failures"
        self.ranks = folder / ".ranks"
        self.lock = folder / ".lock"
        self.lease = folder / ".lease"
        self.job = folder / ".job"

    @property
    def is_run(self) -> bool:
        """Whether a run has written its journal there."""
        return self.journal.is_file()

    def read_config(self) -> dict[str, Any]:
        """Read the resolved options.

        Errors:
            ConfigError: the file is missing or damaged.
        """
        from hvdtrain.yaml_file import read_yaml  # PyYAML takes 30 ms

        return read_yaml(self.config)
