"""Slurm's lists of hosts and counts. `tests/slurm` has the real scontrol read the same lists."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import node_names, slots_by_node


def test_names_keep_their_zeros_and_their_order() -> None:
    assert node_names("n[09-11,7],m3-[1-2],login") == ["n09", "n10", "n11", "n7", "m3-1", "m3-2", "login"]
    assert node_names("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[1-",
        "n[2-1]",
        "n[]",
        "n[a]",
        "n[1-2],",
        "$(id)",
        "n[0-99999999]",
        "a[0-999]b[0-999]",
        "n[1][",
        "n[1-2]x",
        "a b",
    ],
)
def test_an_invalid_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="scontrol show hostnames"):
        node_names(text)


def test_slots_go_to_their_nodes() -> None:
    assert slots_by_node("n[1-3],m", "2(x3),1") == {"n1": 2, "n2": 2, "n3": 2, "m": 1}


@pytest.mark.parametrize("tasks", ["2", "2(x3)", "", "2,2,x"])
def test_counts_of_another_allocation_are_refused(tasks: str) -> None:
    with pytest.raises(LaunchError, match="task counts"):
        slots_by_node("n[1-4]", tasks)
