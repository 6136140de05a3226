"""Tests that run at any number of ranks: `pytest tests/parallel` and `mpirun -np 2 python -m pytest tests/parallel`."""

from __future__ import annotations

import os

import pytest

from hvdtrain.runtime.tuning import prepare

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
INFO, _ = prepare()


@pytest.fixture(scope="session")
def job():  # type: ignore[no-untyped-def]
    """The communicator of the job that pytest itself runs in."""
    from hvdtrain.comm.start import start_comm

    return start_comm(INFO)
