"""Which interfaces lead to other hosts, and which are preferred."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.runtime import interfaces
from hvdtrain.runtime.interfaces import nccl_interfaces, networks, shared_fabric

ADDRESSES = {
    "lo": "127.0.0.1/8",
    "virbr0": "192.168.122.1/24",
    "eth0": "10.0.0.5/24",
    "docker0": "172.17.0.1/16",
    "ib1": "10.2.0.5/16",
    "ib0": "10.1.0.5/16",
    "usb0": "169.254.3.1/16",
    "ibmgmt": "",
}
HOST = {"10.1.0.0/16": "ib0", "10.0.0.0/24": "eth0"}


def have(monkeypatch: pytest.MonkeyPatch, down: str = "", **addresses: str) -> None:
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=text.split("/")[0], netmask=text.split("/")[1])]
        for name, text in addresses.items()
        if text
    }
    state = {name: SimpleNamespace(isup=name != down) for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: state)
    monkeypatch.setattr(interfaces, "is_virtual", lambda name: name.startswith(("docker", "virbr")))


def test_no_virtual_interface_leads_to_other_hosts_and_a_fabric_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, **ADDRESSES)
    assert list(networks().values()) == ["ib1", "ib0", "eth0"]
    assert nccl_interfaces() == "=ib1,ib0"
    have(monkeypatch, "ib1", **ADDRESSES)
    assert list(networks().values()) == ["ib0", "eth0"]
    # NCCL is left alone where it chooses right, as on one host without a network.
    have(monkeypatch, lo="127.0.0.1/8", eth0="10.0.0.5/24")
    assert nccl_interfaces() == ""
    have(monkeypatch, eth0="10.0.0.5/24", virbr0="192.168.122.1/24")
    assert nccl_interfaces() == "=eth0"
    have(monkeypatch, lo="127.0.0.1/8", docker0="172.17.0.1/16")
    assert nccl_interfaces() == ""


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({"10.0.0.0/24": "eth1", "10.1.0.0/16": "ibs2"}, "10.1.0.0/16"),
        ({"10.1.0.0/16": "eth0"}, ""),
        ({"10.7.0.0/16": "ib0", "10.0.0.0/24": "eth0"}, ""),
        ({}, ""),
    ],
)
def test_a_fabric_is_used_where_all_hosts_are_on_it(other: dict[str, str], shared: str) -> None:
    assert shared_fabric([HOST, other]) == shared_fabric([HOST, HOST, other]) == shared
    assert shared_fabric([]) == ""
