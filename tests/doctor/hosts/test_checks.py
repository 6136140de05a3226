"""Findings about hosts that differ or cannot reach each other, from recorded answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.doctor.facts.machine import Interface, Limits
from hvdtrain.doctor.hosts.checks import examine
from hvdtrain.doctor.hosts.host_probe import Attempt
from hvdtrain.doctor.hosts.survey import Survey
from hvdtrain.doctor.report import Finding, by_value, names, worst
from hvdtrain.runtime.host import HostFacts
from tests.doctor.hosts.surveys import WELL, A, other, tried

FABRIC = HostFacts(cores=8, fabric=True)
BRIDGE = Interface("docker0", "172.17.0.1", "172.17.0.0/16", 1500)


def test_all_is_well() -> None:
    assert worst(examine(WELL)) == 0
    alone = Survey({"a": 1}, "/work", "a", facts={"a": A}, addresses={"a": "10.0.0.1"}, sees_file={"a": True})
    assert worst(examine(alone)) == 0


@pytest.mark.parametrize(
    ("survey", "name", "level", "said", "fix"),
    [
        (replace(WELL, lost={"c": "Connection refused"}), "ssh c", "broken", "Connection refused", "systemctl"),
        (other(hvdtrain="2.0"), "hvdtrain", "broken", "1.0 on a; 2.0 on b", "same"),
        (other(python="3.12.1"), "python", "warning", "3.11 on a; 3.12 on b", "same"),
        (other(torch=""), "torch", "broken", "none on b", "same"),
        (other(horovod="0.28.1+torch2.12.0"), "horovod", "broken", "torch2.12.0 on b", "build-horovod"),
        (other(horovod_wrong="built for torch 2.12"), "horovod b", "broken", "built for torch 2.12", "on b: hvdtrain"),
        (other(libmpi="Open MPI v5.0.1"), "libmpi", "broken", "v5.0.1 on b", "same"),
        (other(mpirun=""), "mpirun", "warning", "none on b", "--prefix"),
        (other(machine="aarch64"), "machine", "broken", "aarch64 on b", "same"),
        (other(kernel="Linux 5"), "kernel", "ok", "Linux 5 on b", ""),
        (other(host=HostFacts(4)), "cores", "warning", "8 on a; 4 on b", "a:4,b:2"),
        (other(gpus=("H200", "H200")), "gpus", "warning", "2 x H200 on b", "one rank per GPU"),
        (other(limits=Limits(256)), "open files", "warning", "256", "nofile"),
        (other(host=FABRIC, limits=Limits(locked_bytes=65536)), "locked memory", "warning", "65536", "memlock"),
        (other(folder=False), "folder", "broken", "b", "mkdir"),
        (replace(WELL, writer="", sees_file={}), "folder", "broken", "no host can write", "writable"),
        (replace(WELL, sees_file={"a": True, "b": False}), "folder", "warning", "/work, not shared", "mount"),
        (tried("timeout"), "connections", "broken", "a to b (10.0.0.2)", "--add-source=10.0.0.0/24"),
        (tried("refused"), "connections", "broken", "refused", "nft list ruleset"),
        (tried("route"), "connections", "broken", "a has no route to", "ip route get 10.0.0.2"),
        (tried("stranger"), "connections", "broken", "b is not the only host", "different addresses"),
        (tried("Odd thing"), "connections", "broken", "Odd thing", "ip route get"),
    ],
)
def test_a_difference(survey: Survey, name: str, level: str, said: str, fix: str) -> None:
    (finding,) = _named(survey, name)
    assert finding.level == level and said in f"{finding.found} {finding.why}" and fix in finding.fix, finding
    assert bool(finding.fix) == (level != "ok")


def test_hosts_that_do_not_answer_have_no_other_findings() -> None:
    survey = replace(WELL, facts={}, writer="", sees_file={}, addresses={}, attempts={})
    assert [finding.name for finding in examine(survey) if finding.level != "ok"] == []


def test_one_host_under_two_names_is_noticed() -> None:
    survey = replace(WELL, facts={"a": A, "b": A}, addresses={"a": "10.0.0.1", "b": "10.0.0.1"})
    (finding,) = _named(survey, "same host")
    assert finding.found == "a, b"


def test_harmless_limits_are_not_reported() -> None:
    assert worst(examine(other(limits=Limits(locked_bytes=65536)))) == 0, "TCP pins no memory"


def _named(survey: Survey, name: str) -> list[Finding]:
    return [finding for finding in examine(survey) if finding.name == name]


def test_a_bridge_that_all_hosts_have_is_kept_from_mpi() -> None:
    both = {host: replace(said, interfaces=(*said.interfaces, BRIDGE)) for host, said in WELL.facts.items()}
    (finding,) = _named(replace(WELL, facts=both), "address")
    assert finding.level == "warning" and "172.17.0.1 is docker0" in finding.found
    assert "btl_tcp_if_include 10.0.0.0/24" in finding.fix
    assert not _named(replace(WELL, facts={**WELL.facts, "a": both["a"]}), "address")


def test_interfaces_of_other_names_and_packets_of_other_sizes() -> None:
    way = replace(WELL, attempts={"a": {"b": Attempt("", "eth0", 9000)}, "b": {"a": Attempt("", "ens5", 1500)}})
    (interface,), (mtu,) = _named(way, "interface"), _named(way, "mtu")
    assert "btl_tcp_if_include 10.0.0.0/24" in interface.why
    assert mtu.level == "warning" and "9000 on a; 1500 on b" in mtu.found


def test_the_most_frequent_value_is_first_and_many_hosts_are_counted() -> None:
    values = {**{f"n{i}": "2.13" for i in range(9)}, "x": "2.12"}
    assert by_value(values) == "2.13 on n0, n1, n2, n3, n4, n5 and 3 more; 2.12 on x"
    assert names(["a", "b"]) == "a, b"
