"""The failure card: the content of `failure.json`, and its text. Pure.

``failure.json``, format 1::

    format, time, size             1; seconds since 1970; number of ranks
    kind, sentence, hint, ranks    see `verdict.Verdict`
    run_dir                        as the user gave it
    statements, silent             each rank, see `statement.Statement` and `verdict.SilentRank`
    waited_for                     collectives that not all ranks have started: name, on, not_on, parameters
    checkpoint                     the checkpoint that a resume starts from, or null
    resume                         the command that resumes, or null if there is no config yet; a shell comment names
                                   what it lacks (a Python program, several hosts)

The card contains no environment variables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from hvdtrain.errors import listed
from hvdtrain.observe.failure import verdict as blame
from hvdtrain.observe.failure.fault import Fault, user_frame
from hvdtrain.observe.failure.process_states import UNREACHABLE
from hvdtrain.observe.failure.statement import TRAINING, Statement, grouped, label, labels, place, ranges
from hvdtrain.observe.failure.verdict import SilentRank, Verdict
from hvdtrain.observe.output import table

FORMAT = 1
_WIDTH = 80
_ESSENTIAL_LINES = 14
"""Lines at most of the cause. With rules, checkpoint and command the essential block has 20."""
_MESSAGE_LINES = 5
_FRAMES = 8
_STACKS = 4
_NAMES = 4
_OUTSIDE_MIB = 4096
"""What CUDA and NCCL take of a GPU is less."""
_MEMORY = {
    "rss": "{} MiB",
    "peak_rss": ", peak {} MiB",
    "host_available": "; {} MiB available",
    "host_total": " of the host's {}",
    "cuda_allocated": "; on the GPU {} MiB",
    "cuda_reserved": " of {}",
}
"""Figures of `process_states.memory`, and how a row of the card shows them."""
_LAST_MEMORY = {
    "rss": "{} MiB when last seen alive",
    "host_available": "; {} MiB available of the host's",
    "host_total": " {}",
}


@dataclass(frozen=True)
class Failure:
    """A failure: its cause, the ranks with and without a statement, and the collectives that not all have started."""

    verdict: Verdict
    statements: Sequence[Statement]
    silent: Sequence[SilentRank]
    waited_for: Sequence[Mapping[str, Any]] = ()

    @property
    def blamed(self) -> list[Statement]:
        """The statements of the ranks that caused the failure."""
        return [s for s in self.statements if s.process.rank in self.verdict.ranks]

    @property
    def is_partial(self) -> bool:
        """Whether some ranks did not cause the failure."""
        return len(self.verdict.ranks) < len(self.statements) + len(self.silent)

    @property
    def raised(self) -> Fault | None:
        """The error that caused the failure."""
        return next((s.fault for s in self.blamed if s.fault), None) if self.verdict.kind == blame.EXCEPTION else None


def make_card(failure: Failure, **facts: Any) -> dict[str, Any]:
    """Return the content of `failure.json`. `facts`: time, size, run_dir, checkpoint, resume."""
    return {
        "format": FORMAT,
        **to_builtins(failure.verdict),
        **facts,
        "waited_for": list(failure.waited_for),
        "statements": to_builtins(failure.statements),
        "silent": to_builtins(failure.silent),
    }


def render(failure: Failure, card: Mapping[str, Any], json_path: str) -> str:
    """Return the card as text: details first, the essentials last, because the end is what stays on the screen."""
    cause = _cause(failure)
    details = ["", *cause] if len(cause) > _ESSENTIAL_LINES else []
    details += _details(failure)
    if len(cause) > _ESSENTIAL_LINES:
        cause = [*cause[: _ESSENTIAL_LINES - 1], "  ... (the rest is in the details)"]
    end = [("last checkpoint", card["checkpoint"] or "none yet")]
    end += [("resume", card["resume"])] if card["resume"] else []
    end.append(("details", f"{'above, and in ' if details else ''}{json_path}"))
    lines = ["", "-" * 23 + " failure details " + "-" * 24, *details] if details else [""]
    lines += ["=" * 24 + " the run failed " + "=" * 24, *cause, table(end)]
    lines += ["The launcher's own messages follow this line."] if card["size"] > 1 else []
    return "\n".join([*lines, "=" * 64, ""])


def _details(failure: Failure) -> list[str]:
    first = failure.raised
    parts = ["", first.traceback.rstrip()] if first and not first.parts else []
    if rows := _others(failure):
        parts.append(_section("where the other ranks were" if failure.is_partial else "where the ranks were", rows))
    if rows := [_collective(entry) for entry in failure.waited_for]:
        parts.append(_section("collectives that not all ranks have started", rows))
    parts += _stacks(failure)
    if rows := _memory(failure):
        parts.append(_section("memory", rows))
    for s in failure.blamed[:1]:
        if s.fault and s.fault.memory and s.memory_holders:
            parts.append(_memory_holders(s.memory_holders, s.memory))
    return [*parts, ""] if parts else []


def _cause(failure: Failure) -> list[str]:
    """Return lines for what happened, the error's message, the user's own line, and the hint."""
    verdict, blamed, first = failure.verdict, failure.blamed, failure.raised
    if first is None:
        lines = _wrapped(verdict.sentence, "")
        dead = [s for s in failure.silent if s.process.rank in verdict.ranks]
        lines += [f"  {label(s.process)} was {_last_seen(s)}" for s in dead if s.last][:_STACKS]
        traces = [user_frame(_crash(s.crash), innermost_first=True) for s in dead]
        traces += [user_frame("\n".join(s.stacks.get(TRAINING, []))) for s in blamed]
        frame = next(filter(None, traces), "")
    else:
        lines = _wrapped(f"{verdict.sentence}, {place(blamed[0])}", "") + _error(first)
        frame = first.frame
    return [*lines, *([f"  in {frame}"] if frame else []), *_wrapped(verdict.hint)]


def _error(fault: Fault) -> list[str]:
    """Return an error's message; of an hvdtrain error each part on a line of its own."""
    if fault.parts:
        what = _wrapped(fault.parts.get("what", fault.message))
        rest = [_wrapped(f"{name}: {text}") for name, text in fault.parts.items() if name != "what"]
        return [*what, *(line for lines in rest for line in lines)]
    lines = [line for text in fault.message.splitlines() for line in _wrapped(text)]
    if len(lines) > _MESSAGE_LINES:  # a DataLoader's worker puts its traceback there: the end names the error
        lines = [lines[0], "  ...", *lines[2 - _MESSAGE_LINES :]]
    return lines


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, indent, indent + "  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _others(failure: Failure) -> list[tuple[str, str]]:
    verdict, is_partial = failure.verdict, failure.is_partial
    there = [s for s in failure.statements if s.process.rank not in verdict.ranks or not is_partial]
    if not is_partial and (verdict.kind == blame.EXCEPTION or len(verdict.ranks) == 1):
        return []
    rows = [(who, place(s) + (f"; then {s.fault.type}" if s.fault else "")) for who, s in grouped(there)]
    for s in (s for s in failure.silent if s.process.rank not in verdict.ranks):
        text = f"made no statement; its process is {s.state}; {_last_seen(s)}"
        if s.state == UNREACHABLE:
            text = "reports for itself, because it does not share the run folder"
        rows.append((label(s.process), text))
    return rows


def _last_seen(silent: SilentRank) -> str:
    if not silent.last:
        return "never seen alive"
    step = silent.last["step"]
    return f"last seen alive {silent.last['ago_s']:.0f} s before{f', at step {step}' if step else ''}"


def _collective(entry: Mapping[str, Any]) -> tuple[str, str]:
    names = entry["parameters"]
    of = f" ({listed(names, _NAMES)})"
    started = f"started by rank(s) {ranges(entry['on'])}, not by {ranges(entry['not_on'])}"
    return entry["name"], started + (of if names else "")


def _stacks(failure: Failure) -> list[str]:
    """Return the trace of a crash; of a stall the training threads' stacks, each different one once."""
    crashed = [s for s in failure.silent if s.crash][:_STACKS]
    texts = [f"\n{label(s.process)}\n{textwrap.indent(_crash(s.crash), '  ')}" for s in crashed]
    if failure.verdict.kind == blame.STALL:
        groups: dict[tuple[str, ...], list[Statement]] = {}
        for s in sorted(failure.statements, key=lambda s: s.process.rank not in failure.verdict.ranks):
            groups.setdefault(tuple(s.stacks.get(TRAINING, [])[-_FRAMES:]), []).append(s)
        for stack, group in list(groups.items())[:_STACKS]:
            if stack:
                texts.append(f"\n{labels(s.process for s in group)}, innermost last\n" + "\n".join(stack))
    return texts


def _crash(text: str) -> str:
    """Return the signal and the crashed thread from a trace of faulthandler."""
    blocks = text.split("\n\n")
    return "\n".join([blocks[0], *(block for block in blocks[1:] if block.startswith("Current thread"))])


def _memory(failure: Failure) -> list[tuple[str, str]]:
    ours = [s for s in failure.blamed[:_STACKS] if not (s.fault and s.fault.parts)]
    figures = [(s.process, s.memory, _MEMORY) for s in ours]
    figures += [(s.process, s.last, _LAST_MEMORY) for s in failure.silent[:_STACKS]]
    return [
        (label(process), "".join(form.format(f"{mib[name]:,.0f}") for name, form in forms.items() if name in mib))
        for process, mib, forms in figures
        if "rss" in mib
    ]


def _memory_holders(held: Mapping[str, Any], memory: Mapping[str, float]) -> str:
    """Say what held the memory that ran out, and which options to change."""
    rows = [(name, f"{mib:>10,.1f} MiB") for name, mib in held["mib"].items()]
    advice = []
    if (size := held["micro_batch"]) > 1:
        half = f"--train.micro_batch {size // 2} (is {size})"
        advice.append(f"{half}: the global batch and the loss curve stay the same")
    if held["precision"] == "fp32":
        advice.append("--precision bf16: halves the memory of activations")
    advice += held.get("advice", [])
    if memory.get("cuda_reserved", 0.0) > 1.2 * memory.get("cuda_allocated", 0.0) + 256:
        setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        advice.append(f"{setting}: the reserved memory is fragmented")
    if unused := held.get("unused"):
        blocks = f"{unused['free']:>10,.1f} MiB, in blocks of up to {unused['largest']:,.1f} MiB"
        others = f"{unused['outside']:>10,.1f} MiB: CUDA, NCCL and other programs"
        rows += [("free in torch's allocator", blocks), ("outside of torch", others)]
        if unused["outside"] > _OUTSIDE_MIB:
            advice.append("other programs on this GPU, if nvidia-smi shows any: end them")
    if held["where"] == "host":
        advice.append("fewer ranks on this host: each rank holds all of this")
    if module := held.get("module"):
        rows.append(("asked for more", module))
    if largest := held.get("largest"):
        rows.append(("largest parameters", ", ".join(f"{name} {mib:,.1f} MiB" for name, mib in largest.items())))
    table_of_use = _section(f"use of the {held['where']}'s memory", rows)
    return f"{table_of_use}\nwhat to change\n" + "\n".join(f"  {line}" for line in advice)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return f"\n{title}\n{table(rows)}"
