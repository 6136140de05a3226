"""From srun's variables to Horovod's, and where the store is. `tests/slurm` starts the real ones."""

from __future__ import annotations

import os

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch import slurm_task
from hvdtrain.launch.slurm_task import main, task_numbers, variables
from hvdtrain.launch.srun_job import Tasks, other_node, scancel_id, store_address
from hvdtrain.runtime.environment import by_gloo, rank_info, tasks_per_node

STORE = {slurm_task.STORE: "127.0.0.1:4711/secret/1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "0"}


def tasks(per_node: str) -> list[dict[str, str]]:
    """The variables of all tasks of a step, as srun distributes them in blocks."""
    counts = tasks_per_node(per_node)
    where = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    step = {"SLURM_STEP_NUM_TASKS": str(sum(counts)), "SLURM_STEP_TASKS_PER_NODE": per_node}
    return [
        {**step, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        for rank, (node, local) in enumerate(where)
    ]


@pytest.mark.parametrize("per_node", ["1", "2", "2(x3)", "2(x2),1", "1,3,2", "4,1(x3),2"])
def test_ranks_of_a_local_rank_form_a_row_across_nodes(per_node: str) -> None:
    """Horovod makes a communicator of all with one local_rank: its ranks are 0 to size - 1, in the order of nodes."""
    places = [task_numbers(variables) for variables in tasks(per_node)]
    assert [p["rank"] for p in places] == list(range(len(places)))
    for local in {p["local_rank"] for p in places}:
        row = [p for p in places if p["local_rank"] == local]
        assert [p["cross_rank"] for p in row] == list(range(len(row)))
        assert {p["cross_size"] for p in row} == {len(row)}


def test_a_task_becomes_a_rank_over_gloo() -> None:
    around = {"OMPI_COMM_WORLD_RANK": "5", "HOROVOD_RANK": "7", "HOROVOD_SIZE": "9"}  # of what started srun
    now = {**tasks("2")[1], **around, **STORE}
    after = {**now, **variables(now, "node")}
    info = rank_info(after, "node")
    assert (info.rank, info.size, info.local_rank, info.local_size) == (1, 2, 1, 2)
    assert by_gloo(after)
    assert (after["HOROVOD_GLOO_IFACE"], after["HOROVOD_HOSTNAME"]) == ("lo", "node")


def test_variables_of_the_user_are_kept() -> None:
    own = {"HOROVOD_GLOO_IFACE": "ib0", "HOROVOD_GLOO_TIMEOUT_SECONDS": "9"}
    given = variables({**tasks("1,1")[0], **STORE, **own}, "node")
    assert {name: given[name] for name in own} == own


@pytest.mark.parametrize(
    ("now", "code", "said"),
    [
        ({"SLURM_PROCID": "0"}, 2, "srun did not start this process"),  # as in a batch script
        (tasks("1")[0], 2, "--export=ALL"),
        ({**tasks("1")[0], **STORE, "PATH": os.defpath}, 127, "no such program"),
    ],
)
def test_what_cannot_be_a_rank_is_reported(
    now: dict[str, str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_task, "environ", lambda: now)
    assert main(["no such program"]) == code and said in capsys.readouterr().err


def test_the_store_of_one_node_is_reached_on_that_node_alone() -> None:
    assert other_node({"SLURM_JOB_NODELIST": "n7"}, "n7.cluster") == ""
    assert other_node({"SLURM_JOB_NODELIST": "n7", "SLURMD_NODENAME": "n7"}, "alias") == ""
    assert other_node({"SLURM_JOB_NODELIST": "n[7-9]"}, "n7") == "n8"
    assert other_node({"SLURM_JOB_NODELIST": "n7"}, "login") == "n7"
    assert store_address("", "") == "127.0.0.1"
    assert store_address("", "lo") == "127.0.0.1"
    for node, interface in (("no-such-node.invalid", ""), ("", "none7"), ("localhost", "")):
        with pytest.raises(LaunchError):
            store_address(node, interface)


def test_only_a_number_is_accepted_as_a_step() -> None:
    tasks = Tasks("7")
    for text in (b"", b"0 --user=root", b"-1", b"1\n", b"batch"):
        tasks.set_step(text)
        assert not tasks.step
    tasks.set_step(b"12")
    assert tasks.step


def test_a_job_of_an_array_is_named_alone() -> None:
    assert scancel_id({"SLURM_JOB_ID": "7"}) == "7"
    assert scancel_id({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}) == "7_2"
    with pytest.raises(LaunchError, match="salloc"):
        scancel_id({})
