"""Loader processes that fail, end or hang: the rank says which, and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


RAISES, ENDS, HANGS = "raise ValueError('sample 3 is bad')", "sys.exit(4)", "time.sleep(1000)"


@pytest.mark.parametrize(
    ("act", "draws", "said"),
    [
        (RAISES, 8, ["ValueError: sample 3 is bad"]),
        (ENDS, 8, ["DataError: a loader process has died", "found: ended with exit code 4"]),
        pytest.param(HANGS, 0, [], marks=pytest.mark.slow),  # the rank needs no sample any more
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
