"""Our training under Horovod's own elastic launcher, unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chaos import RANK, ROOT, TASK
from tests.support.launch import ENVIRONMENT, program
from tests.support.scenario import LENGTH, PACE_S, Hosts, nothing_lost

pytestmark = pytest.mark.slow


class Stock:
    """A job of ``horovodrun --gloo`` with a discovery script."""

    def __init__(self, folder: Path, hosts: Hosts, size: int) -> None:
        self.run, self.order = folder / "run", folder / "order"
        elastic = ["-np", str(size), "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts.script)]
        rank = [sys.executable, str(RANK), str(self.order), str(PACE_S), *TASK, LENGTH, f"--run_dir={self.run}"]
        self._command = [program("horovodrun"), "--gloo", *elastic, "--network-interface", "lo", *rank]
        self._process: subprocess.Popen[str]
        self._folder = folder

    @contextmanager
    def running(self) -> Iterator[None]:
        """From its start to its end, which has to be a good one."""
        pipe = subprocess.PIPE
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        with subprocess.Popen(
            self._command, cwd=self._folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        ) as self._process:
            try:
                yield
                out, _ = self._process.communicate()
            finally:
                self._process.terminate()
        assert self._process.returncode == 0, out

    def until(self, text: str) -> None:
        """Read what it says up to a line with a text."""
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was never said:\n{''.join(said)}")

    def hurry(self) -> None:
        """Wait no longer between steps."""
        Path(f"{self.order}.fast").touch()


def test_a_rank_is_killed(tmp_path: Path, losses: dict[int, float]) -> None:
    job = Stock(tmp_path, Hosts(tmp_path, "localhost:1 127.0.0.1:1"), 2)
    job.order.write_text(json.dumps({"fault": "SIGKILL", "phase": "backward", "step": 12, "rank": 1}))
    with nothing_lost(job.run, losses), job.running():
        job.until("resuming from step 11 with 1 rank(s)")
        job.hurry()


def test_a_host_is_added_and_removed(tmp_path: Path, losses: dict[int, float]) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    job = Stock(tmp_path, hosts, 1)
    with nothing_lost(job.run, losses), job.running():
        job.until("step   1/")
        hosts.are("localhost:1 127.0.0.1:1")
        job.until("with 2 rank(s)")
        hosts.are("localhost:1")
        job.until("with 1 rank(s)")
        job.hurry()
