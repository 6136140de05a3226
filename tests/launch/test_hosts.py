"""Hosts from -H and from a discovery script, and invalid ones."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import parse_discovered, parse_hosts, run_script
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
    ("text", "mode", "said"),
    [
        ("#!/bin/sh\necho a; echo no hosts >&2; exit 3", 0o755, "exit code 3: no hosts"),
        ("#!/bin/sh\necho a", 0o644, "Permission denied"),
        ("echo a", 0o755, "#!/bin/sh"),
        ("#!/bin/sh\necho -- -x", 0o755, "-x"),
    ],
)
def test_the_fault_of_a_script_is_reported(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(LaunchError) as wrong:
        run_script(script(tmp_path, text, mode), TIMEOUT_S)
    assert said in str(wrong.value)


def test_a_script_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script, number = tmp_path / "hosts.sh", tmp_path / "number"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > '{number}.new'\nmv '{number}.new' '{number}'\nwait\n")
    script.chmod(0o755)
    patience_s = 0.2
    while not number.exists():  # a machine may be so slow that it has started nothing until then
        patience_s *= 2
        with pytest.raises(LaunchError, match="did not end within"):
            run_script(script, patience_s)
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(number.read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
