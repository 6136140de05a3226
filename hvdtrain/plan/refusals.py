"""What does not go together: one function for each part of a plan, and the nearest options that do.

What depends on the model, the optimizer or the device is refused where these are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from operator import attrgetter
from typing import Any

from hvdtrain.compression.table import TABLE, parse, parse_outer
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import AUTO, BITS, Plan, plan_of

ELASTIC = "elastic"
"""What stands for an option: of the launcher, not of the run."""

_BY_PIECES = ("none", *(name for name, kind in TABLE.items() if kind.coding))
_BY_ROWS = tuple(name for name in TABLE if name != "powersgd")
_WITHOUT_FEEDBACK = tuple(name for name, kind in TABLE.items() if not kind.feedback)
_BY_ELEMENT = ("none", "fp16", "bf16")
_OF_DDP = ("none", "fp16", "bf16", "powersgd")
_ALL = ("tp", "ep", "cp", "pp")  # dimensions of ranks

INSTEAD: Mapping[str, tuple[Any, ...]] = {
    "parallel.engine": ("horovod", "fsdp", "ddp"),
    "parallel.shard": ("none", "optimizer", "gradients", "parameters"),
    "parallel.dp_shard": (None,),
    "parallel.compression": ("none",),
    **dict.fromkeys(("parallel.tp", "parallel.ep", "parallel.cp", "parallel.pp", "parallel.virtual_stages"), (1,)),
    "parallel.bucket_mib": (None,),
    "parallel.sync": ("every_step",),
    "parallel.balance": ("equal",),
    "parallel.buffers": ("mean",),
    "memory.offload": ("none",),
    "precision": ("bf16",),
    "train.compile": (False,),
    "train.ema": (None,),
    "train.reproducible": ("none", BITS),
    "train.verify_every": (0,),
    ELASTIC: (False,),
}
"""Values that may replace those of an option, the likeliest first."""


@dataclass(frozen=True)
class Refusal:
    """Options that do not go together."""

    options: tuple[str, ...]  # their names, such as parallel.engine; the first one does not support the others
    because: str  # why, without a full stop


_Found = Iterator[Refusal]


def refusals(plan: Plan) -> list[Refusal]:
    """Return all that does not go together in a plan."""
    return [each for part in PARTS for each in part(plan)]


def resolve(config: Config, *, elastic: bool = False) -> Plan:
    """Return the plan of a run.

    Errors: ConfigError: parts of it do not go together; it names each, and the nearest options that do.
    """
    check_compression(config.parallel.compression)
    plan = plan_of(config, elastic=elastic)
    if plan.outer is not None:
        parse_outer(plan.outer.coding)
    if found := refusals(plan):
        first, *others = [sentence(config, each) for each in found]
        also = f"also, {'; '.join(others)}" if others else None
        changes = nearest(config, found, elastic=elastic)
        ways = [" ".join(shown(name, value) for name, value in each.items()) for each in changes]
        raise ConfigError(first, found=also, next_step=", or ".join(ways) or None)
    return plan


def sentence(config: Config, refusal: Refusal) -> str:
    """Return what does not go together, and why."""
    first, *others = (shown(name, _value(config, name)) for name in refusal.options)
    return f"{first} does not support {' with '.join(others)}: {refusal.because}"


def shown(name: str, value: Any) -> str:
    """Return an option as one writes it."""
    if name == ELASTIC:
        return "an elastic job" if value else "start the job without --elastic"
    return f"--{name} {'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def nearest(config: Config, found: list[Refusal], *, elastic: bool) -> list[dict[str, Any]]:
    """Return changes of options after which all go together: of those with the fewest options, one for each choice."""
    names = list(dict.fromkeys(name for each in found for name in reversed(each.options)))
    names += [name for name in ("parallel.engine", "parallel.shard") if name not in names]
    for count in range(1, len(names) + 1):
        ways = []
        for chosen in combinations(names, count):
            for values in product(*(INSTEAD[name] for name in chosen)):
                changes = dict(zip(chosen, values, strict=True))
                if not any(_value(config, name) == value for name, value in changes.items() if name != ELASTIC):
                    changed, joins = changed_by(config, changes), changes.get(ELASTIC, elastic)
                    if not refusals(plan_of(changed, elastic=joins)):
                        ways.append(changes)
                        break
        if ways:
            return ways
    return []


def changed_by(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a config with other values of options, by name."""
    for name, value in changes.items():
        section, _, option = name.rpartition(".")
        if name == ELASTIC:
            continue
        if name == "parallel.sync":
            config = replace(config, parallel=replace(config.parallel, workers=None))
        change = {section: replace(getattr(config, section), **{option: value})} if section else {name: value}
        config = replace(config, **change)
    return config


def _value(config: Config, name: str) -> Any:
    return True if name == ELASTIC else attrgetter(name)(config)


def check_compression(text: str) -> None:
    """Check that an option names a compression, or is `AUTO`. Errors: ConfigError: it does neither."""
    try:
        if text != AUTO:
            parse(text)
    except ConfigError as error:
        raise ConfigError(error.what, expected=f"{error.expected}, {AUTO}", next_step=error.next_step) from None


def _mesh(plan: Plan, names: Sequence[str] = ("tp", "ep", "pp")) -> tuple[str, ...]:
    """Return the options of ranks that hold parts of the model, or those of these dimensions."""
    return tuple(f"parallel.{name}" for name in names if getattr(plan.dimensions, name) > 1)


def _those(*rows: tuple[bool, tuple[str, ...], str]) -> _Found:
    """Yield a refusal for each row that applies: options, and why they do not go together."""
    return (Refusal(options, because) for applies, options, because in rows if applies)


def _division(plan: Plan) -> _Found:
    engine, shard, groups, stages = "parallel.engine", "parallel.shard", "parallel.dp_shard", "parallel.pp"
    by_ddp, by_fsdp, in_groups = plan.engine == "ddp", plan.engine == "fsdp", plan.dp_shard is not None
    has_stages, loops = plan.dimensions.pp > 1, plan.dimensions.virtual_stages > 1
    in_order = "FSDP gathers parameters in the order of one group of layers"
    return _those(
        (by_ddp and plan.shard != "none", (engine, shard), "each rank of DDP has all of the optimizer"),
        (by_fsdp and plan.shard != "parameters", (engine, shard), "FSDP divides the parameters, too"),
        (plan.by_horovod and plan.shard == "parameters", (engine, shard), "only FSDP divides parameters"),
        (in_groups and not by_fsdp, (engine, groups), "only FSDP divides a model among groups of ranks"),
        *((by_ddp, (engine, name), "each rank of DDP has the whole model") for name in _mesh(plan)),
        (plan.shard == "gradients" and has_stages, (shard, stages), "a pipeline sums its gradients once a step"),
        (in_groups and has_stages, (groups, stages), "no stage of a pipeline is in a group"),
        (loops and has_stages and by_fsdp, (engine, "parallel.virtual_stages"), in_order),
    )


def compressions(plan: Plan) -> tuple[str, ...]:
    """Return the names of the compressions that the other parts of a plan allow, those that lose least first."""
    allowed = [names for _, names, _ in _codings(plan)]
    return tuple(name for name in (*TABLE, *([] if allowed else [AUTO])) if all(name in names for names in allowed))


def _coding(plan: Plan) -> _Found:
    if plan.bucket_mib is not None and plan.engine == "fsdp" and plan.dp_shard is None:
        yield Refusal(("parallel.engine", "parallel.bucket_mib"), "it exchanges each block by itself")
    name = plan.compression.partition(":")[0]
    for options, names, because in _codings(plan):
        if name not in names:
            yield Refusal((*options, "parallel.compression"), f"{because}, so choose one of {', '.join(names)}")


def _codings(plan: Plan) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Yield options that allow only some compressions, which, and why."""
    divided = _mesh(plan)
    if plan.engine == "ddp":
        yield ("parallel.engine",), _OF_DDP, "torch has no more for DDP"
    elif plan.engine == "fsdp" and plan.dp_shard is not None:
        yield ("parallel.dp_shard",), _BY_ROWS, "groups exchange rows"
    elif plan.engine == "fsdp" and divided:
        yield ("parallel.engine", *divided), ("none",), "FSDP sums what is left of a divided matrix itself"
    elif plan.engine == "fsdp":
        yield ("parallel.engine",), _BY_PIECES, "FSDP sums pieces at their owners"
    elif plan.shard in ("optimizer", "gradients") and divided:
        yield ("parallel.shard", *divided), ("none",), "updated rows are sent as they are"
    elif plan.shard != "none":
        yield ("parallel.shard",), _BY_PIECES, "ranks sum pieces at their owners"
    elif divided:
        yield divided[:1], _WITHOUT_FEEDBACK, "no rank keeps residuals of a part of the model"
    if plan.dimensions.tp > 1 and (plan.dp_shard is not None or plan.shard == "none"):
        # What such ranks have whole is in buckets with different parts, and must stay equal.
        yield ("parallel.tp",), _BY_ELEMENT, "what becomes of a number may depend on no other one"


def _memory(plan: Plan) -> _Found:
    if not plan.offload:
        return
    if plan.shard == "none":
        yield Refusal(("parallel.shard", "memory.offload"), "only a divided optimizer can be in the memory of the host")
    if plan.engine == "fsdp":
        for name in (*_mesh(plan), *(["parallel.dp_shard"] if plan.dp_shard is not None else [])):
            yield Refusal(("parallel.engine", name, "memory.offload"), "their optimizer is on the device")


def _changing_ranks(plan: Plan) -> _Found:
    if not plan.elastic:
        return
    engine = ["parallel.engine"] if plan.engine != "horovod" else []
    for name in (*engine, *_mesh(plan, _ALL)):
        yield Refusal((name, ELASTIC), "its number of ranks is constant")


def _balance(plan: Plan) -> _Found:
    if plan.balance != "speed":
        return
    because = "its speed cannot be measured where a rank waits for others in its passes"
    if plan.shard not in ("none", "optimizer"):
        yield Refusal(("parallel.engine" if plan.engine == "fsdp" else "parallel.shard", "parallel.balance"), because)
    if plan.engine == "ddp" and plan.compression.startswith("powersgd"):
        yield Refusal(("parallel.compression", "parallel.balance"), because)
    for name in _mesh(plan, _ALL):
        yield Refusal((name, "parallel.balance"), because)


def _workers(plan: Plan) -> _Found:
    if plan.outer is None:
        return
    whole = "workers that train apart have whole parameters"
    divided = ["parallel.engine"] if plan.engine != "horovod" else ["parallel.shard"] if plan.shard != "none" else []
    for name in (*divided, *_mesh(plan, _ALL)):
        yield Refusal((name, "parallel.sync"), whole)
    sync, equal = "parallel.sync", "workers have equal shares, or those of --outer.shares"
    yield from _those(
        (plan.precision == "fp16", (sync, "precision"), "workers cannot agree on the scale of a loss"),
        (plan.balance == "speed", (sync, "parallel.balance"), equal),
        (plan.averaged, (sync, "train.ema"), "the outer step averages already"),
        (plan.buffers == "check", (sync, "parallel.buffers"), "buffers of workers differ"),
        (plan.compression == AUTO, (sync, "parallel.compression"), "no step exchanges gradients"),
    )


def _bits(plan: Plan) -> _Found:
    if plan.verifies and not plan.bits:
        yield Refusal(("train.verify_every", "train.reproducible"), "a rank cannot repeat the bits of another one")
    elif plan.verifies and plan.sums_each_pass:
        name = "parallel.engine" if plan.engine == "fsdp" else "parallel.shard"
        yield Refusal(("train.verify_every", name), "ranks sum each pass together, so that none can repeat one alone")
    if not plan.bits:
        return
    bits, by_fsdp = "train.reproducible", plan.engine == "fsdp"
    lossy = "what it loses depends on which rank has a micro-batch"
    together = "sums of what ranks compute together are not yet there with it"
    yield from _those(
        (plan.compression != "none", (bits, "parallel.compression"), lossy),
        (plan.engine == "ddp", (bits, "parallel.engine"), "torch's DDP sums in the order of ranks"),
        (plan.dp_shard is not None, (bits, "parallel.dp_shard"), "sums between groups are not yet there with it"),
        *((True, (bits, name), together) for name in _mesh(plan, _ALL)),
        (plan.outer is not None, (bits, "parallel.sync"), "workers that train apart do not sum gradients"),
        (plan.compiled, (bits, "train.compile"), "compiled code depends on the shapes that a rank has seen"),
        (plan.offload and by_fsdp, (bits, "parallel.engine", "memory.offload"), "torch copies sums before their end"),
    )


PARTS: tuple[Callable[[Plan], _Found], ...] = (_division, _coding, _memory, _changing_ranks, _balance, _workers, _bits)
"""Each yields what its part of a plan refuses."""
