"""docs/combinations.md: which options go together, from the rules that refuse. ``make reference`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.plan.plan import plan_of
from hvdtrain.plan.refusals import ELASTIC, Refusal, changed_by, refusals, shown

_FSDP = {"parallel.engine": "fsdp"}
_PP = {"parallel.pp": 2}
_WORKERS = {"parallel.sync": "diloco:2", "parallel.workers": 2}
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"parallel.engine": "ddp"},
    _FSDP,
    {"parallel.dp_shard": 2, **_FSDP},
    {"parallel.shard": "optimizer"},
    {"parallel.shard": "gradients"},
    {"parallel.tp": 2},
    {"parallel.ep": 2},
    {"parallel.cp": 2},
    _PP,
    {"parallel.virtual_stages": 2, **_PP},
    *(
        {"parallel.compression": name}
        for name in ("fp16", "bf16", "int8", "int8-stochastic", "topk", "powersgd", "auto")
    ),
    {"parallel.bucket_mib": 8.0},
    {"memory.offload": "optimizer", "parallel.shard": "optimizer"},
    _WORKERS,
    {"parallel.balance": "speed"},
    {"parallel.buffers": "check"},
    *({"precision": name} for name in ("fp16", "bf16", "bf16-weights")),
    {"train.compile": True},
    {"train.ema": 0.9},
    {ELASTIC: True},
)
"""What is set besides the defaults; the first name is what a row is about, the others are what it needs."""


def label(setting: Mapping[str, Any]) -> str:
    """Return what a setting is about, as one writes it."""
    name, value = next(iter(setting.items()))
    return shown(name, value)


def pairs() -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any] | None, list[Refusal]]]:
    """Yield each two settings, both together and what refuses them; None for both if they give an option two values."""
    for one, other in combinations(SETTINGS, 2):
        needed = {name: value for name, value in one.items() if name in other and other[name] != value}
        both = {**other, **one} if _may_be_replaced(one, other, needed) else None
        yield one, other, both, [] if both is None else refused(both)


def _may_be_replaced(one: Mapping[str, Any], other: Mapping[str, Any], needed: Mapping[str, Any]) -> bool:
    """Whether options with two values are only what one of them needs, and any value does."""
    abouts = {next(iter(one)), next(iter(other))}
    return len(abouts) == 2 and (not needed or "parallel.shard" in needed)


def refused(options: Mapping[str, Any]) -> list[Refusal]:
    """Return what refuses options."""
    return refusals(plan_of(changed(options), elastic=bool(options.get(ELASTIC))))


def changed(options: Mapping[str, Any]) -> Config:
    """Return the config with these options."""
    ordered = {name: options[name] for name in sorted(options, key=lambda name: name != "parallel.sync")}
    return changed_by(Config(), ordered)


def covering(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return few sets of options, in which each two of these settings that go together are together at least once."""
    left = [(a, b) for a, b in combinations(range(len(settings)), 2) if _joined([settings[a], settings[b]]) is not None]
    found = []
    while left:
        chosen = list(left[0])
        for number in range(len(settings)):
            more = [*chosen, number]
            new = any({a, b} <= {*more} and number in (a, b) for a, b in left)
            if number not in chosen and new and _joined([settings[each] for each in more]) is not None:
                chosen = more
        left = [(a, b) for a, b in left if not {a, b} <= {*chosen}]
        joined = _joined([settings[each] for each in chosen])
        assert joined is not None
        found.append(joined)
    return found


def _joined(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the options of settings; None if they are refused, or give an option two values."""
    joined: dict[str, Any] = {}
    for setting in settings:
        if any(joined.get(name, value) != value for name, value in setting.items()):
            return None
        joined |= setting
    return None if refused(joined) else joined


_HEAD = """\
# Which options go together

Of two options, what is not listed goes together, but for what an option needs: `--parallel.dp_shard` needs
`--parallel.engine fsdp`, `--parallel.virtual_stages` needs `--parallel.pp`,
`--memory.offload` needs a divided optimizer, and what these do not support is not supported with them. With
`--parallel.engine fsdp` it does not go with `--parallel.tp`, `ep` and `pp`, either.
`hvdtrain plan` with the options of a run says it for three and more at once, and names the nearest that work. What
depends on the model, the optimizer or the device is refused at the start of a run. `make reference` writes this page,
from the rules that refuse. Tests train each two options that go together on CPUs, but for `--parallel.dp_shard` with
`--parallel.tp`, which needs 8 ranks, some with `--train.compile`, and what needs a GPU or other ranks later.

| option | does not support | because |
|---|---|---|"""


def page() -> str:
    """Return the text."""
    others: dict[tuple[str, str], list[str]] = {}
    for one, other, _, found in pairs():
        abouts = [next(iter(one)), next(iter(other))]
        for each in found:
            if {*abouts} <= {*each.options}:
                first, second = (one, other) if abouts[0] == each.options[0] else (other, one)
                others.setdefault((label(first), each.because.partition(", so choose")[0]), []).append(label(second))
    rows: dict[tuple[str, ...], list[str]] = {}
    for (first, because), seconds in others.items():
        rows.setdefault((because, *dict.fromkeys(seconds)), []).append(first)
    return "\n".join([_HEAD, *(f"| {_code(names)} | {_code(o)} | {why} |" for (why, *o), names in rows.items()), ""])


def _code(texts: list[str]) -> str:
    """Return options of the same name as one, and without numbers that stand for any."""
    values: dict[str, list[str]] = {}
    for text in texts:
        name, _, value = text.partition(" ") if text.startswith("--") else (text, "", "")
        values.setdefault(name, []).extend([value] if value and value[0].isalpha() else [])
    shown = ((name, f" {' / '.join(found)}" if found else "") for name, found in values.items())
    return ", ".join(f"`{name}{more}`" if name.startswith("--") else name for name, more in shown)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
