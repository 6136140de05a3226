"""The failure card: what `failure.json` holds, and the text made of it. Pure.

``failure.json``, format 1::

    format       1
    time         seconds since 1970
    kind         "exception", "killed" or "stall"
    sentence     what happened
    hint         what it may come from, what to do; may be empty
    ranks        the ranks to blame
    size         number of ranks
    run_dir      as the run was given it
    statements   one a rank that spoke, see `statement.Statement`: place, error, memory in MiB, stacks
    silent       one a rank that did not, see `blame.Silent`
    waited_for   collectives that some ranks started and others did not: name, on, not_on, parameters
    checkpoint   what the run goes on from, or null
    resume       the command that goes on, with a shell's comment where it is not all of it (a Python program, several
                 hosts), or null where the run had not come so far

Nothing of it is taken from the environment's variables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.observe.failure import rank_names as naming
from hvdtrain.observe.failure import verdict as blame
from hvdtrain.observe.failure.fault import Fault
from hvdtrain.observe.failure.process import UNREACHABLE
from hvdtrain.observe.failure.statement import TRAINING, Statement
from hvdtrain.observe.failure.verdict import Silent, Verdict
from hvdtrain.observe.progress import table

FORMAT = 1
_FRAMES = 8
_STACKS = 4
_NAMES = 4


def make_card(
    verdict: Verdict,
    statements: Sequence[Statement],
    silent: Sequence[Silent],
    waited_for: Sequence[Mapping[str, Any]],
    **facts: Any,
) -> dict[str, Any]:
    """What `failure.json` holds. `facts`: time, size, run_dir, checkpoint, resume."""
    return {
        "format": FORMAT,
        **asdict(verdict),
        **facts,
        "waited_for": list(waited_for),
        "statements": [statement.to_json() for statement in statements],
        "silent": [asdict(s) for s in silent],
    }


def render(
    verdict: Verdict, statements: Sequence[Statement], silent: Sequence[Silent], card: Mapping[str, Any], files: str
) -> str:
    """The card as text. `files`: where the whole of it is."""
    blamed = [s for s in statements if s.who.rank in verdict.ranks]
    parts = [_head(verdict, blamed, silent)]
    rows = _others(verdict, statements, silent)
    some = len(verdict.ranks) < len(statements) + len(silent)
    parts += [_section("where the others were" if some else "where the ranks were", rows)] if rows else []
    parts += (
        [_section("what is waited for", [_collective(c) for c in card["waited_for"]])] if card["waited_for"] else []
    )
    parts += _stacks(verdict, statements, silent)
    parts += [_section("memory", rows)] if (rows := _memory(blamed, silent)) else []
    parts += [text for s in blamed[:1] if s.fault and s.fault.memory and (text := _held(s.held, s.memory))]
    end = [("last checkpoint", card["checkpoint"] or "none yet")]
    end += [("go on", card["resume"])] if card["resume"] else []
    parts.append(_section("", [*end, ("all of this", files)]))
    return "\n".join(["", "=" * 24 + " the run failed " + "=" * 24, *parts, "=" * 64, ""])


def _head(verdict: Verdict, blamed: Sequence[Statement], silent: Sequence[Silent]) -> str:
    fault = next((s.fault for s in blamed if s.fault), None)
    if verdict.kind != blame.EXCEPTION or fault is None:
        lines = [verdict.sentence]
        lines += [f"  {naming.label(s.who)} was {_last(s)}" for s in silent if s.last and s.who.rank in verdict.ranks]
    else:
        lines = [f"{verdict.sentence}, {naming.place(blamed[0])}", *_said(fault)]
    return "\n".join([*lines, *textwrap.wrap(verdict.hint, 100, initial_indent="  ", subsequent_indent="  ")])


def _said(fault: Fault) -> list[str]:
    """A user's error by its parts, any other by its traceback."""
    if not fault.parts:
        return ["", fault.traceback.rstrip()]
    rest = [f"  {name}: {text}" for name, text in fault.parts.items() if name != "what"]
    return [f"  {fault.parts.get('what', fault.message)}", *rest]


def _others(verdict: Verdict, statements: Sequence[Statement], silent: Sequence[Silent]) -> list[tuple[str, str]]:
    alone = len(verdict.ranks) < len(statements) + len(silent)
    there = [s for s in statements if s.who.rank not in verdict.ranks or not alone]
    if not alone and (verdict.kind == blame.EXCEPTION or len(verdict.ranks) == 1):
        return []
    rows = []
    for who, statement in naming.grouped(there):
        error = f"; then {statement.fault.type}" if statement.fault else ""
        rows.append((who, naming.place(statement) + error))
    rest = [s for s in silent if s.who.rank not in verdict.ranks]
    return rows + [(naming.label(s.who), _silence(s)) for s in rest]


def _silence(silent: Silent) -> str:
    if silent.state == UNREACHABLE:
        return "speaks for itself: the run folder is not shared with it"
    return f"said nothing; its process is {silent.state}; {_last(silent)}"


def _last(silent: Silent) -> str:
    if not silent.last:
        return "never heard of"
    step = silent.last["step"]
    return f"last heard of {silent.last['ago_s']:.0f} s before{f', at step {step}' if step else ''}"


def _collective(entry: Mapping[str, Any]) -> tuple[str, str]:
    names = entry["parameters"]
    of = f" ({', '.join(names[:_NAMES])}{f' and {len(names) - _NAMES} more' if len(names) > _NAMES else ''})"
    ranks = f"started by rank(s) {naming.ranges(entry['on'])}, not by {naming.ranges(entry['not_on'])}"
    return entry["name"], ranks + (of if names else "")


def _stacks(verdict: Verdict, statements: Sequence[Statement], silent: Sequence[Silent]) -> list[str]:
    """Of a crash what Python wrote; of a run without progress the training threads' stacks, equal ones together."""
    texts = [f"\n{naming.label(s.who)}\n{_indented(_crash(s.crash))}" for s in silent if s.crash][:_STACKS]
    if verdict.kind == blame.STALL:
        groups: dict[tuple[str, ...], list[Statement]] = {}
        for s in sorted(statements, key=lambda s: s.who.rank not in verdict.ranks):
            groups.setdefault(tuple(s.stacks.get(TRAINING, [])[-_FRAMES:]), []).append(s)
        for stack, group in list(groups.items())[:_STACKS]:
            if stack:
                texts.append(f"\n{naming.labels(s.who for s in group)}, innermost last\n" + "\n".join(stack))
    return texts


def _crash(text: str) -> str:
    """Of what Python's faulthandler wrote, what happened and the thread that it happened in."""
    blocks = text.split("\n\n")
    return "\n".join([blocks[0], *(block for block in blocks[1:] if block.startswith("Current thread"))])


def _memory(blamed: Sequence[Statement], silent: Sequence[Silent]) -> list[tuple[str, str]]:
    rows = []
    for s in blamed[:_STACKS]:
        if "rss" in s.memory and not (s.fault and s.fault.parts):
            text = _mib(s.memory, "rss", "{} MiB") + _mib(s.memory, "peak_rss", ", {} MiB at most")
            text += _mib(s.memory, "host_available", "; {} MiB left") + _mib(
                s.memory, "host_total", " of the host's {}"
            )
            text += _mib(s.memory, "cuda_allocated", "; on the GPU {} MiB") + _mib(s.memory, "cuda_reserved", " of {}")
            rows.append((naming.label(s.who), text))
    for gone in silent[:_STACKS]:
        if "rss" in gone.last:
            text = _mib(gone.last, "rss", "{} MiB when last heard of") + _mib(
                gone.last, "host_available", "; {} MiB left of the host's"
            )
            rows.append((naming.label(gone.who), text + _mib(gone.last, "host_total", " {}")))
    return rows


def _mib(figures: Mapping[str, float], name: str, form: str) -> str:
    return form.format(f"{figures[name]:,.0f}") if name in figures else ""


def _held(held: Mapping[str, Any], memory: Mapping[str, float]) -> str:
    """What held the memory that ran out, and what to set."""
    if not held:
        return ""
    rows = [(name, f"{mib:>10,.1f} MiB") for name, mib in held["mib"].items()]
    advice: list[Callable[[], str | None]] = [
        lambda: _less_at_a_time(held),
        lambda: "--precision bf16: activations take half" if held["precision"] == "fp32" else None,
        lambda: _fragmented(memory),
        lambda: "fewer ranks on this host: each holds all of this" if held["where"] == "host's" else None,
    ]
    found = [text for line in advice if (text := line())]
    return _section(f"what held the {held['where']} memory", rows) + "\nto set\n" + "\n".join(f"  {t}" for t in found)


def _less_at_a_time(held: Mapping[str, Any]) -> str | None:
    size = held["micro_batch"]
    if size <= 1:
        return None
    return f"--train.micro_batch {size // 2} (is {size}): the global batch stays, and with it the loss curve"


def _fragmented(memory: Mapping[str, float]) -> str | None:
    allocated, reserved = memory.get("cuda_allocated", 0.0), memory.get("cuda_reserved", 0.0)
    if reserved > 1.2 * allocated + 256:
        return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: what is reserved lies in pieces"
    return None


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return f"\n{title}\n{table(rows)}" if title else f"\n{table(rows)}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
