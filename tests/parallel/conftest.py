"""Tests that run at any number of ranks: `pytest tests/parallel` and `mpirun -np 2 python -m pytest tests/parallel`."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvdtrain.runtime.tuning import prepare

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
INFO, _ = prepare()
LAUNCHED = {"OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE"} & os.environ.keys()


@pytest.fixture(scope="session")
def job():  # type: ignore[no-untyped-def]
    """The communicator of the job that pytest itself runs in."""
    from hvdtrain.comm.rounds import start_comm

    return start_comm(INFO)


@pytest.fixture(scope="session")
def hvd(job: Any) -> Any:
    """`hvdtrain.torch`; only where Horovod runs."""
    if not LAUNCHED:
        pytest.skip("there is no Horovod job: mpirun -np 2")
    import hvdtrain.torch as ours

    ours.init()
    return ours


@pytest.fixture
def several(hvd: Any) -> Any:
    """`hvdtrain.torch`, where there is something to exchange."""
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    return hvd


@pytest.fixture
def several_ranks(job: Any) -> None:
    if job.size == 1:
        pytest.skip("there is one rank: mpirun -np 2")
