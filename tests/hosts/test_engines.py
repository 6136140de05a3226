"""Engines between two hosts: the losses of one rank, and the bytes that groups of ranks send from host to host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.gallery import Recorded
from tests.support.thread_job import train_on_threads
from tests.support.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
FOUND = {"PYTHONPATH": str(ROOT), "OMPI_MCA_mpi_yield_when_idle": "1"}
WIDE = (
    *(f"--task={ROOT}/tests/support/stack.py:wide", "--train.global_batch=8", "--train.micro_batch=1"),
    *("--checkpoint.every=0", "--observe.timeline=off", "--train.check_every=0", "--train.steps=12"),
)
BYTES = 4 * 4 * 512 * 512
"""Of the parameters."""


def _train(hosts: TwoHosts, folder: Path, *options: str, steps: int = 4, per_host: int = 1) -> tuple[list[float], int]:
    """Return the losses of a run, and the bytes that both hosts have sent."""
    before = hosts.a.sent_bytes() + hosts.b.sent_bytes()
    command = [sys.executable, "-m", "hvdtrain", *WIDE, f"--train.stop_at={steps}", f"--run_dir={folder / 'run'}"]
    hosts.mpirun([*command, *options], cwd=ROOT, environment=FOUND, per_host=per_host)
    return Recorded(folder, 0, "", "").losses(), hosts.a.sent_bytes() + hosts.b.sent_bytes() - before


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    train_on_threads(*WIDE, f"--run_dir={folder / 'run'}", size=1)
    return Recorded(folder, 0, "", "").losses()


@pytest.mark.parametrize(
    "options", [("--parallel.engine=ddp",), ("--parallel.engine=fsdp",), ("--parallel.shard=gradients",)]
)
def test_losses_are_those_of_one_rank(
    options: tuple[str, ...], hosts: TwoHosts, alone: list[float], tmp_path: Path
) -> None:
    losses, _ = _train(hosts, tmp_path, *options)
    assert losses == pytest.approx(alone[:4], rel=1e-6) and len(losses) == 4


def test_groups_send_only_gradients_between_hosts_once_a_step(
    hosts: TwoHosts, alone: list[float], tmp_path: Path
) -> None:
    """A step of 2 passes: an all-reduce on 2 ranks sends its data once from each."""

    def sent(name: str, *options: str) -> float:
        """Bytes of a step, over those of the parameters: of many, because starts differ."""
        found = []
        for steps in (2, 12):
            losses, count = _train(hosts, tmp_path / f"{name}{steps}", *options, steps=steps, per_host=2)
            found.append(count)
        assert losses == pytest.approx(alone, rel=1e-6 if name != "int8" else 1e-2)
        return (found[1] - found[0]) / 10 / BYTES

    groups = ("--parallel.engine=fsdp", "--parallel.dp_shard=2")
    assert sent("groups", *groups) == pytest.approx(2.1, abs=0.15)
    assert sent("int8", *groups, "--parallel.compression=int8") == pytest.approx(0.6, abs=0.15)
