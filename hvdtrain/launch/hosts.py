"""Parse the hosts of a job, from ``-H`` and from a discovery script. Pure."""

from __future__ import annotations

import re

from hvdtrain.errors import LaunchError

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_MOST_SLOTS = 4096
LOCAL_NAMES = ("localhost", "127.0.0.1")


def parse_hosts(text: str) -> dict[str, int]:
    """Parse ``a:4,b:4``: the slots of each host, in order.

    Errors:
        LaunchError: an invalid name, an invalid number or 0, or a host that is named twice.
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        _add(hosts, part, part, f"-H {text!r}", least=1)
    return hosts


def parse_discovered(text: str, slots: int = 1) -> dict[str, int]:
    """Parse the output of a discovery script: a line ``host`` or ``host:slots`` per host; empty lines are skipped.

    Args:
        text: the output.
        slots: of a host without a number.

    Errors:
        LaunchError: as of `parse_hosts`; 0 slots are allowed, for a host that must be vacated.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        part = line.removesuffix("\r")
        if part.strip(" \t"):
            _add(hosts, part.strip(" \t"), part, f"line {number} of the discovery script", least=0, slots=slots)
    return hosts


def _add(hosts: dict[str, int], part: str, found: str, where: str, *, least: int, slots: int = 1) -> None:
    name, colon, count = part.rpartition(":")
    name, count = (name, count) if colon else (part, str(slots))
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f"{where} has an invalid host name",
            expected="letters, digits, '.', '-' and '_', not beginning with '-'; host or host:slots",
            found=repr(found),
            next_step="use a name that ssh accepts; for an IPv6 address a name in ~/.ssh/config or /etc/hosts",
        )
    if not re.fullmatch("[0-9]{1,4}", count) or not least <= int(count) <= _MOST_SLOTS:
        expected = f"a whole number from {least} to {_MOST_SLOTS} after the colon"
        raise LaunchError(f"{where} has an invalid number of slots", expected=expected, found=repr(found))
    if name in hosts:
        raise LaunchError(f"{where} names a host twice", expected="each host once, as host:slots", found=repr(name))
    hosts[name] = int(count)
