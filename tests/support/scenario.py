"""Elastic jobs that really train, slowly until a test has seen what it waits for, then as fast as they can."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import last_step, read_steps
from hvdtrain.verify.data import verify_data
from tests.support.chaos import RANK, TASK
from tests.support.fake_launch import FakeJob
from tests.support.warm import warm_python

STEPS = 400
LENGTH = f"--train.steps={STEPS}"
PACE_S = 0.15


class Scenario(FakeJob):
    """A job in a folder.

    Args:
        folder: of the job; the same command in the same folder goes on with the run that is there.
        options: of ``hvdtrain launch``.
        fault: SIGKILL and so on, exception, or "" for none.
        phase, step, rank: where it is to come.
        train: options of training.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        fault: str = "",
        phase: str = "backward",
        step: int = 12,
        rank: int = 1,
        train: Sequence[str] = (),
    ) -> None:
        self.run, order = folder / "run", folder / "order"
        if fault:
            order.write_text(json.dumps({"fault": fault, "phase": phase, "step": step, "rank": rank}))
        self._fast = Path(f"{order}.fast")
        self._fast.unlink(missing_ok=True)
        arguments = [str(order), str(PACE_S), *TASK, LENGTH, f"--run_dir={self.run}", *train]
        # A fork that stops does not stop the process that the agent knows.
        python = [sys.executable] if fault == "SIGSTOP" else warm_python()
        super().__init__(folder, *options, "--events", "events", "--", *arguments, program=RANK, python=python)

    def hurry(self) -> None:
        """Wait no longer between steps."""
        self._fast.touch()

    def end(self) -> tuple[int, str]:
        """As of each job; nobody had to be killed because it did not end."""
        ended = super().end()
        assert not any("did not end in time" in line for line in self.said), "\n".join(self.said)
        return ended

    def finish(self) -> str:
        """Let it run to its end, and return its standard output."""
        self.hurry()
        code, out = self.end()
        assert code == 0, "\n".join(self.said)
        return out

    def until_step(self, step: int) -> None:
        """Wait until its journal tells of a step."""
        journal = self.run / "journal.jsonl"
        while not (journal.exists() and last_step(journal) >= step):
            assert self.poll() is None, self.end()
            time.sleep(0.02)

    def kill_ranks(self) -> None:
        """All of them at once."""
        for process in self.processes(RANK.name):
            if "hvdtrain.launch.agent" not in process.cmdline():
                process.send_signal(signal.SIGKILL)


class Hosts:
    """Hosts that a discovery script names."""

    def __init__(self, folder: Path, hosts: str) -> None:
        self._file, self.script = folder / "hosts", folder / "discover.sh"
        self.are(hosts)
        self.script.write_text(f"#!/bin/sh\nexec cat '{self._file}'\n")
        self.script.chmod(0o755)

    def are(self, hosts: str) -> None:
        """Name others from now on."""
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts.split()))
        new.replace(self._file)


@contextmanager
def nothing_lost(run: Path, expected: Mapping[int, float]) -> Iterator[None]:
    """What the block does to a run is not to be seen in it afterwards."""
    yield
    steps = read_steps(run / "journal.jsonl")
    assert sorted(steps) == sorted(expected)
    assert {step: line["loss"] for step, line in steps.items()} == pytest.approx(dict(expected), rel=1e-5)
    assert not verify_data(run).wrong
