"""``--parallel.sync``: how often workers exchange, and the settings of each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError

EVERY_STEP = "every_step"
METHODS = ("local", "diloco", "streaming", "sparseloco")


def parse_sync(text: str) -> tuple[str, int]:
    """Return the method that a value of ``--parallel.sync`` names, and the steps between two exchanges of a parameter.

    Such as "diloco:32"; of `EVERY_STEP`, that and 1. Errors: ConfigError.
    """
    method, _, every = text.partition(":")
    if text == EVERY_STEP:
        return text, 1
    if method in METHODS and every.isascii() and every.isdigit() and 1 <= int(every) < 2**31:
        return method, int(every)
    raise ConfigError(
        f"invalid --parallel.sync {text!r}",
        expected=f"{EVERY_STEP}, or {', '.join(f'{name}:STEPS' for name in METHODS)} with 1 step or more",
        next_step="for example --parallel.sync diloco:32 --parallel.workers 2",
    )


@dataclass(frozen=True)
class OuterPlan:
    """What workers do between exchanges and in them; all methods are settings of one algorithm."""

    workers: int  # number of them
    every: int  # steps between two exchanges of a parameter
    fragments: int = 1  # parts of the parameters that are exchanged one after the other
    delay: int = 0  # steps until the result of an exchange is used
    mix: float = 0.0  # share of its own parameters that a worker keeps then
    lr: float = 0.7  # learning rate of the outer optimizer
    momentum: float = 0.9  # Nesterov momentum of the outer optimizer
    feedback: float = 1.0  # share of what its coding has lost that a worker adds to its next change
    coding: str = "int8"  # of payloads; "none" to exchange fp32
    start_steps: int = 0  # synchronous steps at the beginning
    shares: tuple[int, ...] = ()  # of each worker in the micro-batches of a step; empty if they are equal

    @property
    def interval(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments


_DEFAULTS: dict[str, dict[str, float | str]] = {
    "local": {"lr": 1.0, "momentum": 0.0},
    "sparseloco": {"lr": 1.0, "momentum": 0.0, "feedback": 0.95, "coding": "topk:0.03"},
}
_STREAMING = 4
"""Fragments of streaming by default, if the number of steps allows it."""


def outer_plan(config: Config) -> OuterPlan | None:
    """Return the plan of a run; None if it exchanges in every step. Errors: ConfigError if options do not fit."""
    (method, every), outer, workers = parse_sync(config.parallel.sync), config.outer, config.parallel.workers
    if method not in METHODS:
        return None
    if workers is None:
        raise ConfigError(
            f"--parallel.sync {config.parallel.sync} needs --parallel.workers",
            expected="the number of workers that train apart, from 2 on",
            next_step="usually, it is the number of sites or hosts; the loss curve depends on it, and not on the number"
            " of ranks",
        )
    streams = method == "streaming"
    fragments = outer.fragments
    if fragments is None:
        fragments = max(n for n in range(1, _STREAMING + 1) if every % n == 0) if streams else 1
    interval = every // fragments
    delay = outer.delay if outer.delay is not None else (interval // 2 if streams else 0)
    given = {"lr": outer.lr, "momentum": outer.momentum, "feedback": outer.feedback, "coding": outer.compression}
    chosen = {**_DEFAULTS.get(method, {}), **{name: value for name, value in given.items() if value is not None}}
    if every % fragments:
        what = f"--outer.fragments {fragments} does not divide --parallel.sync {config.parallel.sync}"
        raise ConfigError(what, expected=f"a divisor of {every}")
    if delay >= interval:
        raise ConfigError(
            f"--outer.delay {delay} is not below the {interval} steps between two exchanges",
            expected=f"0 to {interval - 1}, for --parallel.sync {config.parallel.sync} in {fragments} fragment(s)",
        )
    mix = outer.mix if outer.mix is not None else (0.5 if delay else 0.0)
    rest = {"start_steps": outer.start_steps, "shares": _shares(outer.shares, workers), **chosen}
    return OuterPlan(workers, every, fragments, delay, mix, **rest)  # type: ignore[arg-type]


def _shares(text: str | None, workers: int) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if len(parts) != workers or not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**31 for part in parts):
        raise ConfigError(
            f"invalid --outer.shares {text!r}",
            expected=f"{workers} whole numbers above 0, one for each worker",
            next_step=f"for example {','.join(map(str, range(workers, 0, -1)))}, where worker 0 is the fastest",
        )
    return tuple(map(int, parts))


def apportion(count: int, parts: Sequence[int]) -> list[int]:
    """Divide `count` in proportion to `parts`: by the largest remainders, the first of equal ones get more."""
    whole = sum(parts)
    found = [count * part // whole for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda index: -(count * parts[index] % whole))
    for index in by_rest[: count - sum(found)]:
        found[index] += 1
    return found
