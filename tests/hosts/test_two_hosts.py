"""Two ranks on two hosts, by every launcher that crosses them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_steps
from tests.support.launch import train
from tests.support.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
FOUND = {"PYTHONPATH": str(ROOT)}
TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.global_batch=9", "--train.micro_batch=2", "--train.steps=6"]
LAUNCHERS: dict[str, Callable[..., subprocess.CompletedProcess[str]]] = {
    "mpirun": lambda hosts, *args, **how: hosts.mpirun(*args, **how),
    "horovodrun": lambda hosts, *args, **how: hosts.horovodrun(*args, **how),
    "horovodrun --gloo": lambda hosts, *args, **how: hosts.horovodrun(*args, gloo=True, **how),
}
WHO = """
import json, platform, sys
from pathlib import Path
from hvdtrain.runtime.tuning import prepare
info, choices = prepare()
from hvdtrain.comm.start import start_comm
import torch
comm = start_comm(info)
summed = torch.ones(1_000_000)
comm.allreduce(summed, name="x").wait()
facts = {"host": platform.node(), "size": comm.size, "local_size": comm.local_size, "one_host": info.one_host}
facts["set"] = [choice.setting.variable for choice in choices if choice.applied]
Path(sys.argv[1], str(comm.rank)).write_text(json.dumps({**facts, "sum": float(summed[0])}))
"""


def _losses(run: Path) -> list[float]:
    steps = read_steps(run / "journal.jsonl")
    return [steps[step]["loss"] for step in sorted(steps)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job on one rank of one host."""
    folder = tmp_path_factory.mktemp("alone")
    train(*TOY, f"--run_dir={folder / 'run'}", cwd=folder)
    return _losses(folder / "run")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_on_two_hosts_has_the_losses_of_one_rank(
    launcher: str, hosts: TwoHosts, alone: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sent = hosts.a.sent_bytes(), hosts.b.sent_bytes()
    command = [sys.executable, "-m", "hvdtrain", *TOY, f"--run_dir={run}"]
    LAUNCHERS[launcher](hosts, command, cwd=ROOT, environment=FOUND)
    assert len(alone) == 6
    assert _losses(run) == pytest.approx(alone, rel=2e-6)
    assert hosts.a.sent_bytes() > sent[0]
    assert hosts.b.sent_bytes() > sent[1]


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_ranks_know_that_they_are_on_two_hosts(launcher: str, hosts: TwoHosts, tmp_path: Path) -> None:
    before = hosts.a.sent_bytes(), hosts.b.received_bytes()
    LAUNCHERS[launcher](hosts, [sys.executable, "-c", WHO, str(tmp_path)], cwd=ROOT, environment=FOUND)
    a, b = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert [a["host"], b["host"]] == ["a", "b"]
    for rank in (a, b):
        assert (rank["size"], rank["local_size"], rank["one_host"], rank["sum"]) == (2, 1, False, 2.0)
        assert "OMPI_MCA_coll_tuned_allreduce_algorithm" not in rank["set"]
    assert a["set"] == b["set"]
    assert hosts.a.sent_bytes() - before[0] > 4_000_000  # the tensor went by the link, not by shared memory
    assert hosts.b.received_bytes() - before[1] > 4_000_000
