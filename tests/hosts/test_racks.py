"""Two racks have four hosts, and one host is spare: a host is lost, then a whole rack, twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson

from hvdtrain.verify.data import verify_data
from tests.support.host import LINK, Host, command_of, one_host, required
from tests.support.launch import ROOT
from tests.support.sshd import serve_ssh

ADDRESSES = {name: f"10.77.0.{number}" for number, name in enumerate("abcd", 1)}


class Racks:
    """The hosts a to d. Host a is their switch."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self.hosts = hosts

    def cut(self, *names: str) -> None:
        """Lose what these send and get."""
        self._shape(names, "blackhole")

    def mend(self, *names: str) -> None:
        self._shape(names, "noqueue")

    def _shape(self, names: tuple[str, ...], kind: str) -> None:
        for name in names:
            self.hosts["a"].configure("tc", "qdisc", "replace", "dev", f"to-{name}", "root", kind)
            self.hosts[name].configure("tc", "qdisc", "replace", "dev", LINK, "root", kind)


@contextmanager
def _racks() -> Iterator[Racks]:
    with ExitStack() as stack:
        hosts = {name: stack.enter_context(one_host(name, at, [0, 1])) for name, at in ADDRESSES.items()}
        a, *others = hosts.values()
        a.configure("ip", "link", "add", LINK, "type", "bridge")
        for host in others:
            a.pair(host, port=f"to-{host.name}")
            a.configure("ip", "link", "set", f"to-{host.name}", "master", LINK, "up")
        for host in hosts.values():
            host.configure("ip", "address", "add", f"{host.address}/24", "dev", LINK)
            host.configure("ip", "link", "set", LINK, "up")
        serve_ssh(tuple(hosts.values()))
        yield Racks(hosts)


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process where the test fails: else leaving its context would wait for it."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def test_a_spare_host_is_taken_in_at_once_and_a_rack_may_go_twice(tmp_path: Path) -> None:
    toy = [f"--task={ROOT / 'tests/support/toy.py'}:toy", "--train.steps=1000000", "--run_dir=run"]
    job = ["-np", "3", "--elastic", "2:3", "-H", "a:1,b:1,c:1,d:1", "--events", "events"]
    argv = [sys.executable, "-m", "hvdtrain", "launch", *job, "--", *toy, "--observe.tensorboard=false"]
    with required(), _racks() as racks:
        started = racks.hosts["a"].popen(
            argv, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
        )
        with started as launched, ending(launched):
            assert launched.stderr is not None
            said = (print(line, end="") or line for line in iter(launched.stderr.readline, ""))

            def round_of(number: int, ranks: int) -> None:
                next(line for line in said if f"round {number}: {ranks} rank(s) on {ranks} host(s)" in line)

            round_of(1, 3)
            events = map(orjson.loads, (tmp_path / "events").read_bytes().splitlines())
            first = {event["host"] for event in events if event["event"] == "started"}
            (spare,) = set(ADDRESSES) - first  # the last one that answered
            lost = max(first)
            racks.cut(lost)
            round_of(2, 2)
            round_of(3, 3)  # with the spare host, as the lost one is not back
            racks.mend(lost)
            for number in (4, 6):
                racks.cut(lost, spare)  # a rack, in which one host has a rank
                round_of(number, 2)
                racks.mend(lost, spare)
                round_of(number + 1, 3)
            (driver,) = [pid for pid in racks.hosts["a"].processes() if command_of(pid)[1:4] == argv[1:4]]
            os.kill(driver, signal.SIGTERM)
            assert "SIGTERM: all ranks save and end" in "".join(said)
    assert not verify_data(tmp_path / "run").wrong
