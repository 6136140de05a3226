"""Slurm's lists of hosts, as ``n[01-04,7],m3-[1-2]``. Pure.

By https://slurm.schedmd.com/scontrol.html (show hostnames): a number keeps the zeros before it, and of several
brackets in a name the last runs fastest. Nothing stands behind the last (seen: scontrol of 22.05 gives no name then).
"""

from __future__ import annotations

import itertools
import re

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import tasks_per_node

_MOST = 1 << 16
"""Nodes of a list."""

_ITEM = re.compile(r"[A-Za-z0-9._-]+|(?:[A-Za-z0-9._-]*\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def node_names(text: str) -> list[str]:
    """The names that a list stands for, in its order.

    Errors:
        LaunchError: it is no such list.
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
    """How many ranks each host of an allocation may have.

    Args:
        nodes: as in SLURM_JOB_NODELIST.
        tasks: as in SLURM_TASKS_PER_NODE, ``2(x3),1``.

    Errors:
        LaunchError: either is something else, or they are not of one allocation.
    """
    names = node_names(nodes)
    try:
        counts = tasks_per_node(tasks)
    except ValueError:
        counts = []
    if len(counts) != len(names):
        raise LaunchError(
            "Slurm's counts of tasks are not those of its nodes.",
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
        "This is no list of hosts as Slurm writes them.",
        expected=f"such as n[01-04,7],m3-[1-2], of at most {_MOST} hosts",
        found=f"{part!r} in {text!r}" if part != text else repr(text),
        next_step="scontrol show hostnames shows what Slurm makes of it",
    )
