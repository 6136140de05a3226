"""Parse Slurm's lists of hosts, such as ``n[01-04,7],m3-[1-2]``. Pure.

By https://slurm.schedmd.com/scontrol.html (show hostnames): a number keeps its leading zeros, and of several brackets
the last varies fastest. No text follows the last bracket (scontrol of 22.05 prints no name then).
"""

from __future__ import annotations

import itertools
import re

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import tasks_per_node

_MOST = 1 << 16
"""Most nodes of a list."""

_ITEM = re.compile(r"[A-Za-z0-9._-]+|(?:[A-Za-z0-9._-]*\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def node_names(text: str) -> list[str]:
    """Return the names of a list, in order.

    Errors:
        LaunchError: invalid list.
    """
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if not _ITEM.fullmatch(item):
            raise _wrong(text, item)
        parts = [_numbers(text, part) if part[0] == "[" else [part] for part in re.findall(r"\[[^]]*\]|[^[]+", item)]
        for name in itertools.product(*parts):
            names.append("".join(name))
            if len(names) > _MOST:
                raise _wrong(text, item)
    return names


def slots_by_node(nodes: str, tasks: str) -> dict[str, int]:
    """Return the number of ranks per host of an allocation.

    Args:
        nodes: as in SLURM_JOB_NODELIST.
        tasks: as in SLURM_TASKS_PER_NODE, ``2(x3),1``.

    Errors:
        LaunchError: either is invalid, or their lengths differ.
    """
    names = node_names(nodes)
    try:
        counts = tasks_per_node(tasks)
    except ValueError:
        counts = []
    if len(counts) != len(names):
        raise LaunchError(
            "Slurm's task counts do not match its nodes",
            expected=f"a count for each of {nodes}, such as 2(x3),1",
            found=repr(tasks),
            next_step="give the hosts: -H a:2,b:2",
        )
    return dict(zip(names, counts, strict=True))


def _numbers(text: str, bracket: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket[1:-1].split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not found or not 0 <= last - first < _MOST:
            raise _wrong(text, bracket)
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return numbers


def _wrong(text: str, part: str) -> LaunchError:
    return LaunchError(
        "invalid list of hosts from Slurm",
        expected=f"such as n[01-04,7],m3-[1-2], of at most {_MOST} hosts",
        found=f"{part!r} in {text!r}" if part != text else repr(text),
        next_step="compare with the output of: scontrol show hostnames",
    )
