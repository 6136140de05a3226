"""What does not go together: one function for each part of a plan, and the nearest options that do.

What depends on the model, the optimizer or the device is refused where these are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
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
        raise as_error(config, found, elastic=elastic)
    return plan


def as_error(config: Config, found: list[Refusal], *, elastic: bool) -> ConfigError:
    """Return the error of refused options."""
    told = [sentence(config, each) for each in found]
    ways = [
        " ".join(shown(name, value) for name, value in changes.items())
        for changes in nearest(config, found, elastic=elastic)
    ]
    also = f"also, {'; '.join(told[1:])}" if told[1:] else None
    return ConfigError(told[0], found=also, next_step=", or ".join(ways) or None, everywhere=True)


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
        config = replace(
            config, **({section: replace(getattr(config, section), **{option: value})} if section else {name: value})
        )
    return config


def _value(config: Config, name: str) -> Any:
    if name == ELASTIC:
        return True
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def check_compression(text: str) -> None:
    """Check that an option names a compression, or is `AUTO`. Errors: ConfigError: it does neither."""
    try:
        if text != AUTO:
            parse(text)
    except ConfigError as error:
        raise ConfigError(error.what, expected=f"{error.expected}, {AUTO}", next_step=error.next_step) from None


def _mesh(plan: Plan) -> tuple[str, ...]:
    """Return the options of ranks that hold parts of the model."""
    return tuple(f"parallel.{name}" for name in ("tp", "ep", "pp") if getattr(plan.dimensions, name) > 1)


def _all_dimensions(plan: Plan) -> tuple[str, ...]:
    return tuple(f"parallel.{name}" for name in ("tp", "ep", "cp", "pp") if getattr(plan.dimensions, name) > 1)


def _division(plan: Plan) -> _Found:
    engine = ("parallel.engine",)
    if plan.engine == "ddp" and plan.shard != "none":
        yield Refusal((*engine, "parallel.shard"), "each rank of DDP has all of the optimizer")
    if plan.engine == "fsdp" and plan.shard != "parameters":
        yield Refusal((*engine, "parallel.shard"), "FSDP divides the parameters, too")
    if plan.engine == "horovod" and plan.shard == "parameters":
        yield Refusal((*engine, "parallel.shard"), "only FSDP divides parameters")
    if plan.dp_shard is not None and plan.engine != "fsdp":
        yield Refusal((*engine, "parallel.dp_shard"), "only FSDP divides a model among groups of ranks")
    for name in _mesh(plan) if plan.engine == "ddp" else ():
        yield Refusal((*engine, name), "each rank of DDP has the whole model")
    if plan.shard == "gradients" and plan.dimensions.pp > 1:
        yield Refusal(("parallel.shard", "parallel.pp"), "a pipeline sums its gradients once a step")
    if plan.dp_shard is not None and plan.dimensions.pp > 1:
        yield Refusal(("parallel.dp_shard", "parallel.pp"), "no stage of a pipeline is in a group")


def _schedule(plan: Plan) -> _Found:
    for name, is_set in (("parallel.virtual_stages", plan.dimensions.virtual_stages > 1),):
        if is_set and plan.dimensions.pp > 1 and plan.engine == "fsdp":
            yield Refusal(("parallel.engine", name), "FSDP gathers parameters in the order of one group of layers")


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
    elif plan.engine == "fsdp" and plan.dp_shard is None:
        names, because = (
            (("none",), "FSDP sums what is left of a divided matrix itself")
            if divided
            else (_BY_PIECES, "FSDP sums pieces at their owners")
        )
        yield ("parallel.engine", *divided), names, because
    elif plan.engine == "fsdp":
        yield ("parallel.dp_shard",), _BY_ROWS, "groups exchange rows"
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
    if plan.engine != "horovod":
        yield Refusal(("parallel.engine", ELASTIC), "its number of ranks is constant")
    for name in _all_dimensions(plan):
        yield Refusal((name, ELASTIC), "its number of ranks is constant")


def _balance(plan: Plan) -> _Found:
    if plan.balance != "speed":
        return
    because = "its speed cannot be measured where a rank waits for others in its passes"
    if plan.shard not in ("none", "optimizer"):
        yield Refusal(("parallel.engine" if plan.engine == "fsdp" else "parallel.shard", "parallel.balance"), because)
    if plan.engine == "ddp" and plan.compression.startswith("powersgd"):
        yield Refusal(("parallel.compression", "parallel.balance"), because)
    for name in _all_dimensions(plan):
        yield Refusal((name, "parallel.balance"), because)


def _workers(plan: Plan) -> _Found:
    if plan.outer is None:
        return
    whole = "workers that train apart have whole parameters"
    if plan.engine != "horovod":
        yield Refusal(("parallel.engine", "parallel.sync"), whole)
    elif plan.shard != "none":
        yield Refusal(("parallel.shard", "parallel.sync"), whole)
    for name in _all_dimensions(plan):
        yield Refusal((name, "parallel.sync"), whole)
    for name, is_set, because in (
        ("precision", plan.precision == "fp16", "workers cannot agree on the scale of a loss"),
        ("parallel.balance", plan.balance == "speed", "workers have equal shares, or those of --outer.shares"),
        ("train.ema", plan.averaged, "the outer step averages already"),
        ("parallel.buffers", plan.buffers == "check", "buffers of workers differ"),
        ("parallel.compression", plan.compression == AUTO, "no step exchanges gradients"),
    ):
        if is_set:
            yield Refusal(("parallel.sync", name), because)


def _bits(plan: Plan) -> _Found:
    if plan.verifies and not plan.bits:
        yield Refusal(("train.verify_every", "train.reproducible"), "a rank cannot repeat the bits of another one")
    elif plan.verifies and plan.sums_each_pass:
        name = "parallel.engine" if plan.engine == "fsdp" else "parallel.shard"
        yield Refusal(("train.verify_every", name), "ranks sum each pass together, so that none can repeat one alone")
    if not plan.bits:
        return
    for name, is_set, because in (
        ("parallel.compression", plan.compression != "none", "what it loses depends on which rank has a micro-batch"),
        ("parallel.engine", plan.engine == "ddp", "torch's DDP sums in the order of ranks"),
        ("parallel.dp_shard", plan.dp_shard is not None, "sums between groups are not yet there with it"),
        *(
            (dimension, True, "sums of what ranks compute together are not yet there with it")
            for dimension in _all_dimensions(plan)
        ),
        ("parallel.sync", plan.outer is not None, "workers that train apart do not sum gradients"),
        ("train.compile", plan.compiled, "compiled code depends on the shapes that a rank has seen"),
    ):
        if is_set:
            yield Refusal(("train.reproducible", name), because)
    if plan.offload and plan.engine == "fsdp":
        yield Refusal(("train.reproducible", "parallel.engine", "memory.offload"), "torch copies sums before their end")


PARTS: tuple[Callable[[Plan], _Found], ...] = (
    _division,
    _schedule,
    _coding,
    _memory,
    _changing_ranks,
    _balance,
    _workers,
    _bits,
)
"""Each yields what its part of a plan refuses."""
