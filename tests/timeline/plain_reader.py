"""The oracle of the reader's tests: Horovod's Timeline read as plainly as can be, an event at a time."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.timeline.columns import HorovodTrace

ITEM_BYTES = {"uint8": 1, "int8": 1, "bool": 1, "uint16": 2, "int16": 2, "float16": 2, "int32": 4, "float32": 4}
ITEM_BYTES |= {"int64": 8, "float64": 8, "bfloat16": 2}
NAMED = re.compile(
    rb'\{"name": "process_name", "ph": "M", "pid": (\d+), "args": \{"name": "(.*?)"\}\},\n'
    rb'\{"name": "process_sort_index", "ph": "M", "pid": \1, "args": \{"sort_index": \1\}\},',
    re.DOTALL,
)

Span = tuple[str, str, float, float, int]
"""Tensor, phase, start and duration in microseconds, bytes."""


@dataclass
class Plain:
    """What a file holds, in the order of the file."""

    spans: list[Span] = field(default_factory=list)
    ticks: list[tuple[str, int, float]] = field(default_factory=list)
    still_open: int = 0


def read_plainly(content: bytes) -> Plain:
    """Any bytes."""
    names: dict[int, str] = {}

    def take_name(found: re.Match[bytes]) -> bytes:
        names[int(found[1])] = found[2].decode("utf-8", "replace")
        return b" "

    text = NAMED.sub(take_name, content).decode("latin-1")
    events, at = [], 0
    while (at := text.find("{", at)) >= 0:
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        event = json.loads(text[at:end].encode("latin-1").decode("utf-8", "replace"), strict=False)
        at = end
        if is_event(event):
            events.append(event)
    for event in events:
        if event["ph"] == "M" and event.get("name") == "process_name" and isinstance(event["args"].get("name"), str):
            names[event["pid"]] = event["args"]["name"]
    return pair(events, names)


def is_event(event: dict[str, Any]) -> bool:
    """Whether Horovod could have meant it."""
    if event.get("ph") == "M":
        return type(event.get("pid")) is int and isinstance(event.get("args"), dict)
    if event.get("ph") not in ("B", "E", "X") or "tid" in event or "cat" in event:
        return False
    ts, pid, name = event.get("ts"), event.get("pid"), event.get("name")
    return (
        type(ts) in (int, float)
        and 0 <= ts < 1e16
        and type(pid) is int
        and 0 <= pid < 1 << 24
        and (event["ph"] == "E" or (isinstance(name, str) and name != ""))
        and (event["ph"] != "X" or (name.isascii() and name.isdigit() and len(name) < 8))
    )


def pair(events: list[dict[str, Any]], names: dict[int, str]) -> Plain:
    """Beginnings and ends by a stack a tensor."""
    plain = Plain()
    stacks: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "M":
            continue
        pid = event["pid"]
        tensor = names.get(pid, f"tensor {pid}")
        stack = stacks.setdefault(pid, [])
        if event["ph"] == "X":
            plain.ticks.append((tensor, int(event["name"]), event["ts"]))
        elif event["ph"] == "B":
            stack.append(event)
        elif stack:
            begin = stack.pop()
            if event["ts"] >= begin["ts"]:
                span = (tensor, begin["name"], begin["ts"], event["ts"] - begin["ts"], size(event))
                plain.spans.append(span)
    plain.still_open = sum(map(len, stacks.values()))
    return plain


def size(event: dict[str, Any]) -> int:
    """Bytes of the tensor, -1 where it is not said."""
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        return -1
    shape = re.fullmatch(r"\[([\d, ]*)\]", str(arguments.get("shape")), re.ASCII)
    item = ITEM_BYTES.get(str(arguments.get("dtype")))
    if shape is None or item is None:
        return -1
    total = item
    for length in re.findall(r"\d+", shape[1]):
        total *= int(length)
    return total


def spans_of(trace: HorovodTrace) -> list[Span]:
    """The columns as rows."""
    columns = (trace.tensor, trace.phase, trace.start_us, trace.duration_us, trace.nbytes)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(trace.tensors[t], trace.phases[p], start, duration, n) for t, p, start, duration, n in rows]


def ticks_of(trace: HorovodTrace) -> list[tuple[str, int, float]]:
    """The ticks' columns as rows."""
    rows = zip(trace.tick_tensor.tolist(), trace.tick_rank.tolist(), trace.tick_us.tolist(), strict=True)
    return [(trace.tensors[t], rank, us) for t, rank, us in rows]
