"""``hvdtrain doctor`` in a job on two hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.host import tool
from tests.support.two_hosts import LINK, TwoHosts

ROOT = Path(__file__).parents[2]


def test_doctor_names_what_one_host_would_not_mind(hosts: TwoHosts) -> None:
    ip = tool("ip")
    hosts.a.run([ip, "link", "add", "docker0", "type", "veth", "peer", "name", "veth9"])
    try:
        hosts.a.run([ip, "address", "add", "172.17.0.1/16", "dev", "docker0"])
        for name in ("docker0", "veth9"):
            hosts.a.run([ip, "link", "set", name, "up"])
        done = hosts.mpirun(
            [sys.executable, "-m", "hvdtrain", "doctor", "--json"],
            cwd=ROOT,
            environment={"PYTHONPATH": str(ROOT), "NCCL_SOCKET_IFNAME": "=ib0"},
            check=False,
        )
    finally:
        hosts.a.run([ip, "link", "del", "docker0"])
    said, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.find('{"format"') :])
    found = {check["name"]: check for check in said["checks"]}
    assert said["rank"]["host"] == "a" and said["rank"]["local_size"] == 1
    assert f"{LINK} {hosts.a.address}" in found["interfaces"]["found"]
    assert "docker0" in found["interfaces"]["found"].partition("this host only:")[2]
    assert found["named_interfaces"]["level"] == "broken"
    assert LINK in found["named_interfaces"]["mend"] and "docker0" not in found["named_interfaces"]["mend"]
    assert hosts.a.address in found["host_name"]["found"]
    assert "run_dir_shared" in found
