"""`hvdtrain doctor` asking two hosts: when all is well, and each way in which it is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.host import command_of, until
from tests.support.two_hosts import LINK, OWN, Host, TwoHosts

ROOT = Path(__file__).parents[2]
HERE = {"PYTHONPATH": str(ROOT)}
CONFIG = OWN / "doctor_config"
ALIASES = f"""\
Host refused
  HostName b
  Port 23
Host unknown
  HostName b
  UserKnownHostsFile /dev/null
Host changed
  HostName b
  UserKnownHostsFile {OWN}/wrong_hosts
Host denied
  HostName b
  User nobody
Host silent
  HostName 10.77.0.99
Host *
  Include {OWN}/ssh_config
"""


def doctor(host: Host, *options: str, cwd: Path = ROOT, python: str = sys.executable, path: str = str(ROOT)) -> Any:
    """What it says as JSON; its exit status agrees."""
    argv = [python, "-m", "hvdtrain", "doctor", "--json", *options]
    done = host.run(argv, cwd=cwd, environment={"PYTHONPATH": path}, check=False)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert done.returncode == ["ok", "warning", "broken"].index(said["level"])
    return said


def checks(said: Any) -> dict[str, Any]:
    return {check["name"]: check for check in said["checks"]}


@contextmanager
def docker0(*hosts: Host) -> Iterator[None]:
    """Give each host a bridge for containers, with the address that it has everywhere."""
    for host in hosts:
        host.configure("ip", "link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
        host.configure("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        for name in ("docker0", "docker1"):
            host.configure("ip", "link", "set", name, "up")
    try:
        yield
    finally:
        for host in hosts:
            host.configure("ip", "link", "del", "docker0")


def test_two_hosts_that_are_alike(hosts: TwoHosts, tmp_path: Path) -> None:
    said = doctor(hosts.a, "--hosts", "a,b", cwd=tmp_path)
    found = checks(said)
    assert said["level"] == "ok", said
    assert found["hosts"]["found"] == "a, b"
    assert {"hvdtrain", "python", "torch", "horovod", "libmpi", "mpirun", "cores"} <= found.keys()
    assert found["folder"]["found"] == f"{tmp_path}, shared" and not list(tmp_path.iterdir())
    assert found["connections"]["found"].startswith("each host reaches all others (2 connections)")
    assert (found["interface"]["found"], found["mtu"]["found"]) == (LINK, "1500")
    until(lambda: not _probes(hosts), "no process of doctor's is left")


def _probes(hosts: TwoHosts) -> list[list[str]]:
    commands = map(command_of, hosts.a.processes() | hosts.b.processes())
    return [words for words in commands if any("doctor.hosts.host_probe" in word for word in words)]


def test_each_failure_of_ssh_is_reported_with_its_fix(hosts: TwoHosts) -> None:
    hosts.a.write(CONFIG, ALIASES)
    key = (hosts.a.files / "run/two_hosts/host_key.pub").read_text()
    hosts.a.write(OWN / "wrong_hosts", f"b,{hosts.b.address} {key}")
    names = "a,b,nowhere,refused,unknown,changed,denied,silent"
    said = doctor(hosts.a, "--hosts", names, "--ssh-option=-F", f"--ssh-option={CONFIG}")
    found = checks(said)
    assert found["hosts"]["found"] == "a, b", "the others are compared all the same"
    for name, why, fix in (
        ("nowhere", "no address", "/etc/hosts"),
        ("refused", "no ssh server listens on that port", "--ssh-port"),
        ("unknown", "is not known", "ssh unknown true"),
        ("changed", "differs from the known one", f"ssh-keygen -R changed -f {OWN}/wrong_hosts"),
        ("denied", "does not accept this user", "ssh-copy-id denied"),
        ("silent", "no answer", "ping silent"),
    ):
        finding = found[f"ssh {name}"]
        assert finding["level"] == "broken" and why in finding["why"] and fix in finding["mend"], finding
    assert found["connections"]["level"] == "ok"


def test_an_environment_that_the_other_host_lacks_is_named(hosts: TwoHosts) -> None:
    python = OWN / "bin" / "python-of-a"
    hosts.a.configure("ln", "-sfn", sys.executable, str(python))
    packages = Path(psutil.__file__).parents[1]
    found = checks(doctor(hosts.a, "--hosts", "a,b", python=str(python), path=f"{ROOT}:{packages}"))
    assert found["ssh b"]["level"] == "broken"
    assert str(python) in found["ssh b"]["found"] and "same path" in found["ssh b"]["mend"]


def test_a_firewall_that_drops_connections_is_recognised(hosts: TwoHosts) -> None:
    hosts.wall(hosts.a)
    found = checks(doctor(hosts.a, "--hosts", "a,b"))
    finding = found["connections"]
    assert finding["level"] == "broken"
    assert finding["found"] == f"a to b ({hosts.b.address})", "the other direction is open"
    assert "firewall" in finding["why"] and "10.77.0.0/24" in finding["mend"]


def test_differences_of_the_hosts_are_named(hosts: TwoHosts) -> None:
    """A folder that each has alone, packets of other sizes, and an address that both have."""
    hosts.b.configure("ip", "link", "set", LINK, "mtu", "1400")
    try:
        with docker0(hosts.a, hosts.b):
            found = checks(doctor(hosts.a, "--hosts", "a,b", cwd=OWN))
    finally:
        hosts.b.configure("ip", "link", "set", LINK, "mtu", "1500")
    for name, said in (("folder", "not shared"), ("mtu", "1400 on b"), ("address", "172.17.0.1 is docker0")):
        assert found[name]["level"] == "warning" and said in found[name]["found"]


def test_in_a_job_doctor_names_what_one_host_would_not_mind(hosts: TwoHosts) -> None:
    given = {**HERE, "NCCL_SOCKET_IFNAME": "=ib0"}
    with docker0(hosts.a):
        argv = [sys.executable, "-m", "hvdtrain", "doctor", "--json"]
        done = hosts.mpirun(argv, cwd=ROOT, environment=given, check=False)
    said, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.find('{"format"') :])
    found = checks(said)
    assert said["rank"]["host"] == "a" and said["rank"]["local_size"] == 1
    assert f"{LINK} {hosts.a.address}" in found["interfaces"]["found"]
    assert "docker0" in found["interfaces"]["found"].partition("this host only:")[2]
    assert found["named_interfaces"]["level"] == "broken"
    assert LINK in found["named_interfaces"]["mend"] and "docker0" not in found["named_interfaces"]["mend"]
    assert hosts.a.address in found["host_name"]["found"]
    assert "run_dir_shared" in found
