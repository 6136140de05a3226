"""Our training under Horovod's own elastic launcher, unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chaos import RANK, ROOT, TASK
from tests.support.launch import ENVIRONMENT, program
from tests.support.scenario import LENGTH, STEPS, Hosts, nothing_lost

pytestmark = pytest.mark.slow

_PACE_S = 300.0 / STEPS
"""The run must not be over before a new host's rank has started, which takes long on a busy machine."""


@contextmanager
def stock(folder: Path, hosts: Hosts, size: int) -> Iterator[Callable[[str], str]]:
    """A job of ``horovodrun --gloo``, which has to end well; yields what reads its output up to a line with a text.

    When the block is left, it waits no longer between steps.
    """
    order = folder / "order"
    elastic = ["-np", str(size), "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts.script)]
    rank = [sys.executable, str(RANK), str(order), str(_PACE_S), *TASK, LENGTH, f"--run_dir={folder / 'run'}"]
    argv = [program("horovodrun"), "--gloo", *elastic, "--network-interface", "lo", *rank]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    pipe, said = subprocess.PIPE, list[str]()
    with subprocess.Popen(
        argv, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = (said.append(line) or line for line in process.stdout)
        try:
            yield lambda text: next((line for line in lines if text in line), "") or pytest.fail("".join(said))
            Path(f"{order}.fast").touch()
            out, _ = process.communicate()
        finally:
            process.terminate()
    assert process.returncode == 0, "".join([*said, out])


def test_a_rank_is_killed(tmp_path: Path, losses: dict[int, float]) -> None:
    fault = {"fault": "SIGKILL", "phase": "backward", "step": 12, "rank": 1}
    (tmp_path / "order").write_text(json.dumps(fault))
    hosts = Hosts(tmp_path, "localhost:1 127.0.0.1:1")
    with nothing_lost(tmp_path / "run", losses), stock(tmp_path, hosts, 2) as until:
        until("resuming from step 11 with 1 rank(s)")


def test_a_host_is_added_and_removed(tmp_path: Path, losses: dict[int, float]) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    with nothing_lost(tmp_path / "run", losses), stock(tmp_path, hosts, 1) as until:
        until("step   1/")
        hosts.are("localhost:1 127.0.0.1:1")
        until("with 2 rank(s)")
        hosts.are("localhost:1")
        until("with 1 rank(s)")
