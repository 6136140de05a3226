"""The communicator of a real job keeps the contract, and compressors keep theirs over it: HorovodComm under mpirun."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import Compression
from hvdtrain.errors import LaunchError
from tests.support import compression_contract
from tests.support.compression_contract import AS_USED, named
from tests.support.contract import CLAUSES, halves


@pytest.fixture(scope="module", autouse=True)
def sets_of_halves(job: Comm) -> Iterator[None]:
    """Process sets for `subset`; other tests may make the same ones, which Horovod has only once."""
    if job.size == 1:
        yield
        return
    from hvdtrain.comm.horovod import _groups, hvd

    made = {tuple(ranks): hvd.add_process_set(ranks) for ranks in halves(job.size)}
    _groups.update(made)
    yield
    for ranks, process_set in made.items():
        del _groups[ranks]
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_job(clause: Callable[[Comm], None], job: Comm) -> None:
    clause(job)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_copies_on_the_host(clause: Callable[[Comm], None], job: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks share a CUDA device."""
    if job.size == 1:
        pytest.skip("one rank shares no device")
    monkeypatch.setattr(job, "through_host", True)
    clause(job)


def test_an_exchange_that_is_not_complete_is_refused_on_a_gpu(job: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    if job.size == 1:
        pytest.skip("one rank exchanges nothing")
    monkeypatch.setenv("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    type(job)()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(LaunchError, match="HOROVOD_ENABLE_ASYNC_COMPLETION"):
        type(job)()


@pytest.mark.parametrize("clause", compression_contract.CLAUSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("compression", AS_USED, ids=named)
def test_compressors(compression: Compression, clause: Callable[[Comm, Compression], None], job: Comm) -> None:
    clause(job, compression)
