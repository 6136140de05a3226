"""Slurm's lists of hosts and counts. `tests/slurm` has the real scontrol read the same lists."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import node_names, slots_by_node, slurm_slots


def test_names_keep_their_zeros_and_their_order() -> None:
    assert node_names("n[09-11,7],m3-[1-2],login") == ["n09", "n10", "n11", "n7", "m3-1", "m3-2", "login"]
    assert node_names("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"]


INVALID = ["n[1-", "n[2-1]", "n[]", "n[a]", "n[1-2],", "$(id)", "n[0-99999999]", "a[0-999]b[0-999]", "n[1][", "n[1-2]x"]


@pytest.mark.parametrize("text", ["", "a b", *INVALID])
def test_an_invalid_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="scontrol show hostnames"):
        node_names(text)


def test_slots_go_to_their_nodes() -> None:
    assert slots_by_node("n[1-3],m", "2(x3),1") == {"n1": 2, "n2": 2, "n3": 2, "m": 1}


@pytest.mark.parametrize("tasks", ["2", "2(x3)", "", "2,2,x"])
def test_counts_of_another_allocation_are_refused(tasks: str) -> None:
    with pytest.raises(LaunchError, match="task counts"):
        slots_by_node("n[1-4]", tasks)


TWO = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "16,8"}


@pytest.mark.parametrize(
    ("more", "gpus", "ranks", "slots"),
    [
        ({"SLURM_NTASKS": "2"}, 0, 0, [1, 1]),
        ({"SLURM_NTASKS": "2", "SLURM_GPUS_PER_NODE": "a100:4"}, 0, 0, [4, 4]),
        ({"SLURM_NTASKS": "2", "SLURM_GPUS_ON_NODE": "2"}, 0, 4, [2, 2]),
        ({"SLURM_GPUS_PER_NODE": "8"}, 4, 0, [4, 4]),
        ({"SLURM_GPUS_PER_NODE": "2"}, 0, 10, [16, 8]),
        ({}, 0, 24, [16, 8]),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, 0, 24, [16, 8]),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, 0, 0, [1, 1]),
    ],
)
def test_slots_of_an_allocation(more: dict[str, str], gpus: int, ranks: int, slots: list[int]) -> None:
    """GPUs before tasks; cores only limit a number of ranks that is asked for."""
    assert list(slurm_slots({**TWO, **more}, gpus, ranks).values()) == slots


def test_an_allocation_that_names_no_number_of_ranks_is_refused() -> None:
    with pytest.raises(LaunchError, match="hvdtrain launch -np N"):
        slurm_slots(TWO, 0, 0)
    with pytest.raises(LaunchError, match="heterogeneous"):
        slurm_slots({**TWO, "SLURM_NTASKS": "2", "SLURM_HET_SIZE": "2"}, 0, 0)
