"""Hosts from -H, from a discovery script and from Slurm; invalid ones, and those without an address.

`tests/slurm` has the real scontrol read the same lists.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import LaunchError, UnreachableError
from hvdtrain.launch import hosts
from hvdtrain.launch.hosts import node_names, parse_discovered, parse_hosts, run_script
from tests.support.launch import TIMEOUT_S

BAD = ["-oProxyCommand=x", "a b", "a'b", 'a"b', "a\nb", "a;b", "a$(b)", "a\x00b", "", "-", "a/b", "a`b", "é", "[::1]"]


def test_hosts_keep_their_order() -> None:
    assert list(parse_hosts("b:2,a:4,me@c.d").items()) == [("b", 2), ("a", 4), ("me@c.d", 1)]


def test_an_answer_may_have_empty_lines_and_hosts_without_slots() -> None:
    assert parse_discovered("b:2\n\n  a  \r\nc:0\n") == {"b": 2, "a": 1, "c": 0}
    assert parse_discovered("") == {}


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_none_are_refused_and_shown(name: str) -> None:
    with pytest.raises(LaunchError) as wrong:
        parse_hosts(f"{name}:2")
    assert repr(f"{name}:2") in str(wrong.value)
    if name.strip() and "\n" not in name:
        with pytest.raises(LaunchError, match="line 2 of the discovery script"):
            parse_discovered(f"ok:1\n{name}:2\n")


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a:x", "a:1.5", "a:", "a:99999", "a:1,a:2", "a:1,"])
def test_numbers_and_hosts_named_twice_are_refused(text: str) -> None:
    with pytest.raises(LaunchError):
        parse_hosts(text)


@given(st.text(max_size=30))
def test_no_text_gets_an_option_or_a_shell_word_through(text: str) -> None:
    try:
        names = [*parse_hosts(text), *parse_discovered(text)]
    except LaunchError:
        return
    for name in names:
        assert not name.startswith("-") and name.isascii()
        assert all(c.isalnum() or c in "._-@" for c in name)


def script(folder: Path, text: str, mode: int = 0o755) -> Path:
    path = folder / "hosts of mine.sh"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_script_is_run_by_its_path(tmp_path: Path) -> None:
    asked = script(tmp_path, "#!/bin/sh\necho a:2\necho b\n")
    assert run_script(asked) == {"a": 2, "b": 1}
    assert run_script(asked, slots=8) == {"a": 2, "b": 8}


@pytest.mark.parametrize(
    ("text", "mode", "said", "advice"),
    [
        ("#!/bin/sh\necho a; echo no hosts >&2; exit 3", 0o755, "exit code 3: no hosts", ""),
        ("#!/bin/sh\necho -- -x", 0o755, "-x", ""),
        ("#!/bin/sh\necho a", 0o644, "Permission denied", "chmod +x"),
        ("echo a", 0o755, "#!/bin/sh", "interpreter"),
    ],
)
def test_the_fault_of_a_script_is_reported(tmp_path: Path, text: str, mode: int, said: str, advice: str) -> None:
    with pytest.raises(LaunchError) as wrong:
        run_script(script(tmp_path, text, mode), TIMEOUT_S)
    assert said in str(wrong.value) and advice in str(wrong.value.next_step)


@pytest.mark.parametrize(
    ("name", "advice"), [("cat hosts", "without arguments"), ("missing", "the path"), (".", "a folder")]
)
def test_what_is_no_script_is_reported(name: str, advice: str) -> None:
    with pytest.raises(LaunchError, match=advice):
        run_script(Path(name))


def test_a_script_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script, number = tmp_path / "hosts.sh", tmp_path / "number"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > '{number}.new'\nmv '{number}.new' '{number}'\nwait\n")
    script.chmod(0o755)
    patience_s = 0.2
    while not number.exists():  # a machine may be so slow that it has started nothing until then
        patience_s *= 2
        with pytest.raises(UnreachableError, match="did not end within"):
            run_script(script, patience_s)
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(number.read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_names_keep_their_zeros_and_their_order() -> None:
    assert node_names("n[09-11,7],m3-[1-2],login") == ["n09", "n10", "n11", "n7", "m3-1", "m3-2", "login"]
    assert node_names("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"]


INVALID = ["n[1-", "n[2-1]", "n[]", "n[a]", "n[1-2],", "$(id)", "n[0-99999999]", "a[0-999]b[0-999]", "n[1][", "n[1-2]x"]


@pytest.mark.parametrize("text", ["", "a b", *INVALID])
def test_an_invalid_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="scontrol show hostnames"):
        node_names(text)


def test_slots_go_to_their_nodes() -> None:
    assert hosts.slots_by_node("n[1-3],m", "2(x3),1") == {"n1": 2, "n2": 2, "n3": 2, "m": 1}


@pytest.mark.parametrize("tasks", ["2", "2(x3)", "", "2,2,x"])
def test_counts_of_another_allocation_are_refused(tasks: str) -> None:
    with pytest.raises(LaunchError, match="task counts"):
        hosts.slots_by_node("n[1-4]", tasks)


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
    assert list(hosts.slurm_slots({**TWO, **more}, gpus, ranks).values()) == slots


def test_an_allocation_that_names_no_number_of_ranks_is_refused() -> None:
    with pytest.raises(LaunchError, match="hvdtrain launch -np N"):
        hosts.slurm_slots(TWO, 0, 0)
    with pytest.raises(LaunchError, match="heterogeneous"):
        hosts.slurm_slots({**TWO, "SLURM_NTASKS": "2", "SLURM_HET_SIZE": "2"}, 0, 0)
