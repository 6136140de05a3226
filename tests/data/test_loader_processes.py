"""Loader processes that fail, end or hang: the rank says which, and ends. They hear no signals of a job's end."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.data.loader_processes import batches_of_processes, signals_blocked
from hvdtrain.errors import TransientDataError
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S

PROGRAM = """
import os, sys, time
import torch
from torch.utils.data import Dataset
from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.loader import Stream, train_batches

class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            open("reached", "w")
            {act}
        return torch.ones(1)

if __name__ == "__main__":
    loader = LoaderConfig(workers=1, prefetch=8)
    batches = train_batches(Stream(Samples(), 1, 1, 1, 0, 1), 0, 8, loader, None, on_cuda=False)
    for _ in range({draws}):
        next(batches)
    while not os.path.exists("reached"):
        time.sleep(0.01)
"""


class Ending:
    """A process that has ended when it is looked at for the third time."""

    looks = 0

    @property
    def exitcode(self) -> int | None:
        self.looks += 1
        return -9 if self.looks > 2 else None

    def kill(self) -> None:
        self.looks = 100


def failing(error: Exception) -> Iterator[int]:
    yield 1
    raise error


def test_a_lost_connection_is_reported_as_the_end_of_the_process() -> None:
    batches = batches_of_processes(failing(RuntimeError("lost connection")), [Ending()])  # type: ignore[list-item]
    assert next(batches) == 1
    with pytest.raises(TransientDataError, match="a loader process has died") as caught:
        next(batches)
    assert "signal 9" in caught.value.found or "SIGKILL" in caught.value.found


def test_an_exception_of_the_data_set_is_itself() -> None:
    process = Ending()
    with pytest.raises(ValueError, match="sample 3 is bad"):
        list(batches_of_processes(failing(ValueError("Caught ValueError: sample 3 is bad")), [process]))  # type: ignore[list-item]
    assert not process.looks, "it waits for no end"


class Cycle(list[int]):
    """Batches that refer to themselves; of torch's, `__del__` waits until the processes have ended."""

    def __init__(self, process: Ending, looks: list[int]) -> None:
        self.own, self.process, self.looks = self, process, looks

    def __del__(self) -> None:
        self.looks.append(self.process.looks)


def test_processes_are_killed_before_torch_waits_for_them() -> None:
    process, looks = Ending(), list[int]()
    batches_of_processes(Cycle(process, looks), [process])  # type: ignore[list-item, arg-type]
    gc.collect()
    assert looks == [100]


@pytest.mark.parametrize("before", [set(), {signal.SIGTERM}])
def test_processes_start_with_the_signals_of_a_job_s_end_blocked(before: set[int]) -> None:
    """Then those are blocked that were before."""
    own = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        with signals_blocked():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        after = signal.pthread_sigmask(signal.SIG_SETMASK, own)
    assert blocked >= {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT} and after == before


RAISES, ENDS, HANGS = "raise ValueError('sample 3 is bad')", "sys.exit(4)", "time.sleep(1000)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "draws", "said"),
    [
        (RAISES, 8, ["ValueError: sample 3 is bad"]),
        (ENDS, 8, ["DataError: a loader process has died", "found: ended with exit code 4"]),
        (HANGS, 0, []),  # the rank needs no sample any more
    ],
    ids=["raises", "ends", "hangs"],
)
def test_the_rank_reports_the_reason_and_ends(act: str, draws: int, said: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(act=act, draws=draws))
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode != 0) == bool(said), done.stderr
    assert all(line in done.stderr for line in said), done.stderr
