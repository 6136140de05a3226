"""Unknown host names are reported before MPI tries them."""

from __future__ import annotations

import os
import shutil

import pytest

from hvdtrain.cli.launch import main
from hvdtrain.launch.hosts import find_unknown_host

needs_ssh = pytest.mark.skipif(
    shutil.which("ssh") is None and "CI" not in os.environ, reason="there is no ssh: apt-get install openssh-client"
)


def test_the_first_that_has_no_address_is_named() -> None:
    assert find_unknown_host([]) is None
    assert find_unknown_host(["localhost", "me@127.0.0.1"]) is None
    assert find_unknown_host(["localhost", "me@a.invalid", "b.invalid"]) == "me@a.invalid"


@needs_ssh
@pytest.mark.parametrize("option", ["HostName=127.0.0.1", "ProxyJump=gate.invalid", "ProxyCommand=nc %h %p"])
def test_a_name_or_a_way_that_ssh_knows_is_enough(option: str) -> None:
    assert find_unknown_host(["a.invalid"], ["-o", option]) is None
    assert find_unknown_host(["a.invalid"], ["-o", "HostName=b.invalid"]) == "a.invalid"


def test_without_an_answer_of_ssh_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_unknown_host(["a.invalid"], ["--no-such-option"]) == "a.invalid"
    monkeypatch.setenv("PATH", "")
    assert find_unknown_host(["me@127.0.0.1", "a.invalid"]) == "a.invalid"


def test_it_is_reported_before_mpis_long_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr("os.execvpe", lambda program, argv, variables: started.append(argv))
    monkeypatch.setattr("hvdtrain.cli.launch._found", lambda command: command)
    argv = ["--to", "openmpi", "-np", "2", "-H", "localhost:1,b.invalid:1", "--ssh-port", "2222"]
    argv += ["--ssh-option=-4"]
    main(argv)
    said = capsys.readouterr().err
    assert "unknown host b.invalid" in said
    assert "doctor --hosts localhost,b.invalid --ssh-port 2222 --ssh-option=-4" in said
    assert len(started) == 1
    main([*argv, "--dry-run"])
    main([*argv[:5], "localhost:2"])
    assert "no address" not in capsys.readouterr().err and len(started) == 2
