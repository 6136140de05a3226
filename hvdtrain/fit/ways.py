"""Ways to divide a model among ranks, and which of those that fit to propose. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import TYPE_CHECKING

from hvdtrain.data.order import micro_batches
from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    from hvdtrain.fit.memory import Memory

GIB = 1 << 30
_MOST = {"ep": 64, "tp": 8, "cp": 8, "pp": 8}
"""Ranks that divide experts, matrices, sequences or layers in the meshes that are tried, in this order."""
_UNEVEN = 1.25
"""How many samples a rank may have, as a multiple of an even share."""
_FSDP = "fsdp"
"""The end of a mesh with `--parallel.engine fsdp`."""


@dataclass(frozen=True)
class Line:
    """A way to divide the state, and what was predicted of it."""

    ranks: int
    shard: str
    checkpointing: str
    memory: Memory | None  # None if it is refused
    refused: str = ""  # why; else empty
    micro_batch: int | None = None  # samples, if the largest that fits was looked for
    mesh: str = ""  # such as tp2xep4 or tp2xfsdp; empty for a value of `--parallel.shard`
    proposed: bool = False  # whether it is the best one that fits


@dataclass(frozen=True)
class Way:
    """A way to divide the state among ranks: the value of --parallel.shard, or a mesh; and its options."""

    shard: str
    options: tuple[str, ...]
    mesh: str = ""
    family: str = ""  # the dimension of an automatic mesh, and whether it is with FSDP; empty for other ways


def fits_in(memory: Memory, gib: float | None) -> bool:
    """Return whether the tensors fit in the memory of a device; in None, all do."""
    return gib is None or memory.peak <= gib * GIB


def sizes_to_try(global_batch: int, ranks: int) -> list[int]:
    """Return micro-batches, powers of two, ascending, that divide the work evenly: see `_UNEVEN`. 1 is among them."""
    share = -(-global_batch // ranks)
    powers = takewhile(lambda size: size <= share, (1 << n for n in range(32)))

    def busiest(size: int) -> int:
        return sum(batch.stop - batch.start for batch in micro_batches([(0, global_batch)], size, 0, ranks))

    return [size for size in powers if size == 1 or busiest(size) <= _UNEVEN * global_batch / ranks]


def shard_options(shard: str) -> tuple[str, ...]:
    """Return the options for a value of `--parallel.shard`."""
    return (f"--parallel.shard={shard}", *(["--parallel.engine=fsdp"] if shard == "parameters" else []))


def meshes_to_try(text: str | None, count: int, engine: str) -> Iterator[Way]:
    """Yield the meshes to try in a job with an engine. Errors: ConfigError: one is not a mesh."""
    if text in (None, "auto"):
        for more, (name, most) in product(("", f"x{_FSDP}")[: 1 + (engine != _FSDP)], _MOST.items()):
            width = 2
            while width <= min(most, count) and count % width == 0:
                yield replace(_way(f"{name}{width}{more}"), family=f"{name}{more}")
                width *= 2
        return
    for mesh in text.split(",") if text not in (None, "none") else []:
        if not re.fullmatch(rf"(ep|tp|cp|pp)\d+(x(ep|tp|cp|pp)\d+)*(x{_FSDP})?", mesh):
            raise ConfigError(f"invalid --meshes {text!r}", expected="such as ep8,tp2xcp4,tp2xfsdp", found=mesh)
        yield _way(mesh)


def _way(mesh: str) -> Way:
    shard = "parameters" if mesh.endswith(_FSDP) else "none"
    options = [option.replace(" ", "=") for option in _mesh_options(mesh)]
    return Way(shard, (*options, *(["--parallel.shard=parameters"] if shard == "parameters" else [])), mesh)


def _mesh_options(mesh: str) -> list[str]:
    parts = mesh.split("x")
    return [f"--parallel.engine {part}" if part == _FSDP else f"--parallel.{part[:2]} {part[2:]}" for part in parts]


def propose(lines: list[Line], gib: float | None) -> tuple[list[Line], list[str]]:
    """Mark the best of the lines that fit, for each number of several ranks; return all lines, and why."""
    reasons = []
    for count in dict.fromkeys(line.ranks for line in lines if line.ranks > 1) if gib is not None else []:
        tried = [line for line in lines if line.ranks == count]
        fitting = [(line, line.memory) for line in tried if line.memory and fits_in(line.memory, gib)]
        if not fitting:
            continue
        best, memory = min(fitting, key=lambda each: (each[1].bubble, each[1].waited_for, each[1].sent))
        lines = [replace(line, proposed=True) if line is best else line for line in lines]
        others = "nothing else fits;" if len(tried) > 1 else "nothing else was tried;"
        if len(fitting) > 1:
            others = f"of {len(fitting)} ways that fit, it has the least to wait for and to send:"
        sent, waited = (f"{count / (1 << 20):,.1f} MiB" for count in (memory.sent, memory.waited_for))
        reasons += [
            f"proposal for {count} rank(s): {_options(best)}",
            f"  {others} a rank sends {sent} a step",
            *([f"  and waits for {waited} of them in forward and backward"] if memory.waited_for else []),
            *([f"  its stages wait in {memory.bubble:.0%} of a step or more"] if memory.bubble else []),
        ]
    return lines, reasons


def _options(line: Line) -> str:
    modes = [f"--memory.checkpointing {line.checkpointing}"] if line.checkpointing != "none" else []
    shard = ["--parallel.engine fsdp"] if line.shard == "parameters" else [f"--parallel.shard {line.shard}"]
    return " ".join([*(_mesh_options(line.mesh) if line.mesh else shard), *modes])
