"""Checks of option values that types cannot express."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from hvdtrain.config.schema import Config, TrainConfig
from hvdtrain.config.sync import apportion, outer_plan
from hvdtrain.config.windows import AUTO, parse_window
from hvdtrain.errors import ConfigError
from hvdtrain.files import is_url

_LIMIT = 2**31
"""No real count of steps, samples or batches is as large."""

_Rule = tuple[Callable[[Any], bool], str]
_COUNT: _Rule = (lambda value: 1 <= value < _LIMIT, "1 to 2^31 - 1")
_AT_LEAST_1: _Rule = (lambda value: value >= 1, "1 or more")
_POSITIVE: _Rule = (lambda value: value > 0, "more than 0")
_DECAY_RATE: _Rule = (lambda value: 0 <= value < 1, "0 or more, and less than 1")


def _not_negative(meaning_of_0: str) -> _Rule:
    return lambda value: value >= 0, f"0 ({meaning_of_0}) or more"


def _is_http(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0  # port: ValueError if too large
    except ValueError:
        return False


def _is_store(text: str) -> bool:
    try:
        url = urlsplit(text)
        return is_url(text) and url.password is None and not url.query and not url.scheme.startswith("http")
    except ValueError:
        return False


def _fraction(of: str) -> _Rule:
    return lambda value: 0 <= value <= 1, f"0 to 1, a fraction of {of}"


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("train.steps", "train.global_batch", "parallel.tp", "parallel.ep", "parallel.cp"), _COUNT),
    **dict.fromkeys(("parallel.pp", "parallel.virtual_stages", "outer.fragments", "loader.prefetch"), _COUNT),
    **dict.fromkeys(("train.stop_at", "train.eval_every", "train.patience", "train.max_skipped"), _AT_LEAST_1),
    "checkpoint.keep": _AT_LEAST_1,
    **dict.fromkeys(("train.epochs", "optimizer.lr", "optimizer.eps", "parallel.bucket_mib", "outer.lr"), _POSITIVE),
    "observe.peak_tflops": _POSITIVE,
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "outer.momentum"), _DECAY_RATE),
    "outer.mix": _DECAY_RATE,
    "train.clip": _not_negative("off"),
    "train.eval_samples": _not_negative("all"),
    "train.check_every": _not_negative("at checkpoints only"),
    "train.verify_every": _not_negative("never"),
    "train.ema": (lambda value: 0 < value < 1, "more than 0, and less than 1"),
    "train.router_bias": _not_negative("off"),
    "train.balance_loss": _not_negative("none"),
    "optimizer.weight_decay": _not_negative("off"),
    "optimizer.warmup_steps": _not_negative("no warm-up"),
    "optimizer.min_lr": _fraction("optimizer.lr"),
    "optimizer.decay": _fraction("all steps"),
    "parallel.dp_shard": (lambda value: value >= 2, "2 or more"),
    "parallel.workers": (lambda value: 2 <= value < _LIMIT, "2 or more"),
    "outer.feedback": _fraction("what compression has lost"),
    "outer.start_steps": _not_negative("none"),
    "outer.delay": _not_negative("use it at once"),
    "loader.workers": (lambda value: 0 <= value <= 1024, "0 to 1024 processes per rank"),
    "checkpoint.every": _not_negative("at the end only"),
    "elastic.loss_s": _not_negative("lose nothing"),
    "observe.line_every_s": _not_negative("each step"),
    "observe.stall_timeout_s": _not_negative("never"),
    "observe.watch_every_s": _not_negative("never"),
    "observe.prometheus": (
        lambda value: 1 <= value <= 65535 if isinstance(value, int) else value.endswith(".prom"),
        "a port, 1 to 65535, or a file NAME.prom",
    ),
    "observe.otlp": (_is_http, "a URL such as http://collector:4318"),
    "observe.price_per_hour": _not_negative("free"),
    "run_dir": (
        lambda value: value and not is_url(value),
        "a folder of this machine, or null for one under runs/; --checkpoint.to URL copies the run to a store",
    ),
    "checkpoint.to": (_is_store, "a URL such as s3://bucket/run, without a password"),
    "seed": (lambda value: 0 <= value < 2**63, "0 to 2^63 - 1"),
}


def check_values(flat: Mapping[str, Any], config: Config) -> None:
    """Check the values of the options that every run has; `flat` has those of `config` by name: ``train.steps``.

    Errors: ConfigError: a value is out of range, or two options contradict each other.
    """
    train = config.train
    up_to_batch = (lambda value: 1 <= value <= train.global_batch, f"1 to train.global_batch ({train.global_batch})")
    for name, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name} is {value!r}, which is out of range", expected="a finite number")
    for name, (is_valid, expected) in {**_RULES, "train.micro_batch": up_to_batch}.items():
        value = flat[name]
        if value is not None and not is_valid(value):
            problem = "empty" if value == "" else "out of range"
            raise ConfigError(f"--{name} is {value!r}, which is {problem}", expected=expected)
    if train.epochs is not None and train.steps != TrainConfig.steps:
        raise ConfigError(
            "--train.steps and --train.epochs both set the length of training",
            expected="one of them",
            found=f"--train.steps {train.steps} and --train.epochs {train.epochs:g}",
            next_step="omit one; --train.epochs null overrides the epochs of a config file",
        )
    _check_workers(config)
    if config.observe.timeline != AUTO:
        parse_window(config.observe.timeline, "observe.timeline", AUTO)
    parse_window(config.observe.profile, "observe.profile")


def _check_workers(config: Config) -> None:
    """Check that the options fit to workers that train apart. Errors: ConfigError."""
    plan, train, sync = outer_plan(config), config.train, f"--parallel.sync {config.parallel.sync}"
    if plan is None:
        if config.parallel.workers is not None:
            what = f"--parallel.workers {config.parallel.workers} has no effect with {sync}"
            raise ConfigError(what, next_step="add for example --parallel.sync diloco:32, or omit it")
        return
    most = -(-train.global_batch // train.micro_batch)
    if plan.shares and not all(apportion(most, plan.shares)):
        raise ConfigError(
            f"--outer.shares {config.outer.shares} leaves a worker without any of the {most} micro-batches of a step",
            expected="a micro-batch or more for each worker in each step",
            next_step="smaller --train.micro_batch, a larger --train.global_batch, or other shares",
        )
    if most < plan.workers:
        raise ConfigError(
            f"{plan.workers} workers, but a step has only {most} micro-batch(es)",
            expected="a micro-batch or more for each worker in each step",
            next_step=f"--train.micro_batch {max(1, train.global_batch // plan.workers)}, or a larger"
            " --train.global_batch",
        )
