"""TorchComm keeps the contract too, in the process group that it makes under any launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from hvdtrain.comm.base import Comm
from hvdtrain.comm.torch_group import TorchComm, new_group
from hvdtrain.comm.torch_order import naming_lost_rank
from hvdtrain.comm.torch_store import join_default_group, store_over
from hvdtrain.errors import LaunchError, LostRankError
from tests.support.contract import CLAUSES


@pytest.fixture(scope="module")
def by_torch(job: Comm) -> Iterator[TorchComm]:
    """The ranks of the job, by torch.distributed."""
    store = store_over(job)
    join_default_group(store, job.rank, job.size)
    made = TorchComm(job, store)
    yield made
    job.barrier()  # rank 0 serves the store
    if job.size == 1:  # this process goes on with other tests
        made.close()


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_contract(clause: Callable[[Comm], None], by_torch: TorchComm) -> None:
    clause(by_torch)


def test_a_rank_may_wait_for_a_later_collective_before_it_begins_an_earlier_one(by_torch: TorchComm) -> None:
    first = by_torch.allreduce(torch.ones(1), name="first") if by_torch.rank == 0 else None
    assert by_torch.allreduce(torch.ones(1), name="second").wait().item() == by_torch.size
    first = first or by_torch.allreduce(torch.ones(1), name="first")
    assert first.wait().item() == by_torch.size


def test_a_collective_makes_progress_while_a_rank_waits_for_something_else(by_torch: TorchComm) -> None:
    group = new_group(by_torch)
    handle = by_torch.allreduce(torch.ones(1), name="background")
    if by_torch.rank > 0:
        handle.wait()
    dist.barrier(group)
    assert handle.wait().item() == by_torch.size
    dist.destroy_process_group(group)


def test_shares_of_rows_and_strided_tensors(by_torch: TorchComm) -> None:
    rows = torch.arange(3.0 * (by_torch.size + 1)).reshape(-1, 3)
    share = by_torch.reducescatter(rows.to(torch.bfloat16), name="rows").wait()
    assert torch.equal(share, torch.tensor_split(rows.bfloat16() * by_torch.size, by_torch.size)[by_torch.rank])
    columns = torch.ones(4, 3).T
    assert by_torch.allreduce(columns, name="columns").wait() is columns
    assert columns.sum() == 12 * by_torch.size


def test_the_log_of_collectives_does_not_grow(by_torch: TorchComm, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.comm import torch_order

    monkeypatch.setattr(torch_order, "_BLOCK", 8)
    store = by_torch._order._store
    for _ in range(16):
        by_torch.barrier()
    by_torch.barrier()  # every rank has read the block before
    keys = store.num_keys()
    for _ in range(64):
        by_torch.barrier()
    by_torch.barrier()
    assert store.num_keys() <= keys + 16


@pytest.mark.parametrize(("name", "value"), [("get_backend_config", "cuda:nccl"), ("get_world_size", 7)])
def test_a_group_of_the_program_that_does_not_fit_is_refused(
    name: str, value: object, by_torch: TorchComm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, name, lambda: value)
    with pytest.raises(LaunchError, match=r"the program's torch\.distributed group") as caught:
        new_group(by_torch)
    assert str(value) in str(caught.value.found)


@pytest.mark.parametrize("text", ["Connection closed by peer [::1]:7", "Broken pipe"])
def test_an_error_of_a_lost_rank_is_named_and_others_stay(text: str) -> None:
    with pytest.raises(LostRankError, match="during a sum") as caught, naming_lost_rank("a sum"):
        raise RuntimeError(text)
    assert isinstance(caught.value.__cause__, RuntimeError) and text in str(caught.value.found)
    with pytest.raises(RuntimeError, match="shapes differ"), naming_lost_rank("a sum"):
        raise RuntimeError("shapes differ")
