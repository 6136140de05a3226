"""From command line, YAML or dict to a `RunConfig`, by jsonargparse. Imports no torch of its own.

The parameters of the task's function become top-level keys beside those of `Config`: a parameter that is a
dataclass becomes a section.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import math
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from hvdtrain.config.schema import Config, TrainConfig
from hvdtrain.config.spelling import EitherSpelling, declared_spelling
from hvdtrain.config.windows import AUTO, parse_window
from hvdtrain.errors import ConfigError
from hvdtrain.run_layout import RunLayout
from hvdtrain.yaml_file import read_yaml

"""Files of a run folder: the resolved config, and a hash of its options."""

_MOST = 2**31
"""No count of steps, samples or batches reaches it but by a slip."""

NOT_IDENTITY = ("run_dir", "resume", "log_level", "train.stop_at", "observe.")
"""How options begin in which two stretches of one run may differ."""


@dataclass(frozen=True)
class RunConfig:
    """A config with the arguments of its task.

    Attributes:
        config: the options that every run has.
        task_args: arguments for the task's function, by parameter name.
        resolved: all of it as plain values, as it is written to `config.yaml`.
    """

    config: Config
    task_args: Mapping[str, Any]
    resolved: Mapping[str, Any]

    def identity(self) -> str:
        """A hash that is equal for two configs which may go on with the same run."""
        flat = {k: v for k, v in flatten(self.resolved).items() if not k.startswith(NOT_IDENTITY)}
        return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]


def task_spec(argv: Sequence[str]) -> str:
    """The task that `argv` asks for, itself or by its config file: whichever comes last, as for other options."""
    spec = Config.task
    for name, value in _pairs(argv):
        if name == "--task":
            spec = value
        elif name == "--config":
            spec = str(read_yaml(Path(value)).get("task", spec))
    return spec


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each argument as an option: its name, and what comes behind "=" or as the next argument."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        yield name, value if equals else following


def _values_of(option: str, argv: Sequence[str]) -> list[str]:
    return [value for name, value in _pairs(argv) if declared_spelling(name, (option,)) == option]


class _Parser(EitherSpelling, ArgumentParser):
    """The parser of options of training."""


def make_parser(task_function: Callable[..., Any] | None) -> ArgumentParser:
    """A parser of the options of `Config` and of the parameters of `task_function`."""
    parser = _Parser(
        allow_abbrev=False, prog="hvdtrain", exit_on_error=False, description="Train a model on all ranks of this job."
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file of options; later options win.")
    parser.add_class_arguments(Config, as_group=False)
    if task_function is not None:
        _check_parameters(task_function)
        parser.add_function_arguments(task_function, as_group=False, fail_untyped=False)
    return parser


def parse_argv(argv: Sequence[str], task_function: Callable[..., Any] | None) -> RunConfig:
    """Parse a command line.

    Errors:
        ConfigError: an unknown option (the nearest is named), a wrong value (what was expected is said).
    """
    parser = make_parser(task_function)
    for path in map(Path, _values_of("--config", argv)):
        if "config" in read_yaml(path):  # the parser reads it too, and is less strict
            raise ConfigError(
                f"the config file {str(path)!r} names another one",
                next_step="give both on the command line: --config A --config B; later options win",
            )
    try:
        namespace = parser.parse_args(list(argv))
    except ArgumentError as error:
        raise _explain(error, parser, argv) from None
    paths = _values_of("--config", argv)
    if paths and not _values_of("--run_dir", argv):
        namespace.run_dir = run_of_config(Path(paths[-1]), namespace.resume) or namespace.run_dir
    return _finish(parser, namespace)


def run_of_config(path: Path, resume: str) -> str | None:
    """Return the run folder that a config file belongs to, which it resumes.

    None for any other file, and where the option `resume` is never.
    """
    layout = RunLayout(path.parent)
    is_of_run = resume != "never" and path.name == layout.config.name and layout.identity.exists()
    return str(path.parent) if is_of_run else None


def parse_object(options: Mapping[str, Any], task_function: Callable[..., Any] | None) -> RunConfig:
    """Parse a nested dict, as YAML would give it. Errors as in `parse_argv`."""
    parser = make_parser(task_function)
    try:
        namespace = parser.parse_object(dict(options))
    except ArgumentError as error:
        raise _explain(error, parser, [f"--{key}" for key in flatten(options)]) from None
    return _finish(parser, namespace)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"train": {"steps": 5}}`` as ``{"train.steps": 5}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each option in which two resolved configs differ, but for those of `NOT_IDENTITY`."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(NOT_IDENTITY)
    ]


def _check_parameters(task_function: Callable[..., Any]) -> None:
    taken = {field.name for field in fields(Config)} | {"config"}
    clash = sorted(taken & inspect.signature(task_function).parameters.keys())
    if clash:
        raise ConfigError(
            f"the task function's parameter {clash[0]!r} is also the name of an option that every run has",
            next_step="rename it (torch's random state is already seeded from --seed);"
            f" taken are {', '.join(sorted(taken))}",
        )


def _finish(parser: ArgumentParser, namespace: Namespace) -> RunConfig:
    for section in parser.groups or ():
        if not isinstance(found := namespace.get(section), Namespace):
            raise ConfigError(
                f"{section} is a section, and has one value",
                expected=f"options below it, such as {section}: {{...}}",
                found=str(found),
                next_step=f"leave {section} out for the defaults",
            )
    resolved = yaml.safe_load(parser.dump(namespace))
    values = vars(parser.instantiate(namespace))
    names = {field.name for field in fields(Config)}
    config = Config(**{name: values[name] for name in names})
    _check(config)
    task_args = {k: v for k, v in values.items() if k not in names and k != "config"}
    return RunConfig(config, task_args, resolved)


def _check(config: Config) -> None:
    train, observe, bucket_mib = config.train, config.observe, config.parallel.bucket_mib
    optimizer = config.optimizer
    rules: list[tuple[bool, str, str, object]] = [
        *(
            (math.isfinite(value), name, "a finite number", value)
            for name, value in flatten(asdict(config)).items()
            if isinstance(value, float)
        ),
        (1 <= train.steps < _MOST, "train.steps", "1 to 2^31 - 1", train.steps),
        (train.epochs is None or train.epochs > 0, "train.epochs", "more than 0", train.epochs),
        (train.stop_at is None or train.stop_at >= 1, "train.stop_at", "1 or more", train.stop_at),
        (1 <= train.global_batch < _MOST, "train.global_batch", "1 to 2^31 - 1", train.global_batch),
        (
            1 <= train.micro_batch <= train.global_batch,
            "train.micro_batch",
            f"1 to train.global_batch ({train.global_batch})",
            train.micro_batch,
        ),
        (train.clip >= 0, "train.clip", "0 (off) or more", train.clip),
        (train.eval_every is None or train.eval_every >= 1, "train.eval_every", "1 or more", train.eval_every),
        (train.eval_samples >= 0, "train.eval_samples", "0 (all) or more", train.eval_samples),
        (train.check_every >= 0, "train.check_every", "0 (at checkpoints only) or more", train.check_every),
        (train.max_skipped >= 1, "train.max_skipped", "1 or more", train.max_skipped),
        (optimizer.lr > 0, "optimizer.lr", "more than 0", optimizer.lr),
        (optimizer.weight_decay >= 0, "optimizer.weight_decay", "0 (off) or more", optimizer.weight_decay),
        (0 <= optimizer.beta1 < 1, "optimizer.beta1", "0 or more, and less than 1", optimizer.beta1),
        (0 <= optimizer.beta2 < 1, "optimizer.beta2", "0 or more, and less than 1", optimizer.beta2),
        (optimizer.eps > 0, "optimizer.eps", "more than 0", optimizer.eps),
        (0 <= optimizer.momentum < 1, "optimizer.momentum", "0 (off) or more, and less than 1", optimizer.momentum),
        (optimizer.warmup_steps >= 0, "optimizer.warmup_steps", "0 or more", optimizer.warmup_steps),
        (0 <= optimizer.min_lr <= 1, "optimizer.min_lr", "0 to 1, a share of optimizer.lr", optimizer.min_lr),
        (0 <= optimizer.decay <= 1, "optimizer.decay", "0 to 1, a share of all steps", optimizer.decay),
        (config.elastic.loss_s >= 0, "elastic.loss_s", "0 (nothing) or more", config.elastic.loss_s),
        (observe.line_every_s >= 0, "observe.line_every_s", "0 (each step) or more", observe.line_every_s),
        (config.run_dir != "", "run_dir", "a folder, or null for one under runs/", "''"),
        (bucket_mib is None or bucket_mib > 0, "parallel.bucket_mib", "more than 0", bucket_mib),
        (0 <= config.loader.workers <= 1024, "loader.workers", "0 to 1024 processes a rank", config.loader.workers),
        (1 <= config.loader.prefetch < _MOST, "loader.prefetch", "1 to 2^31 - 1", config.loader.prefetch),
        (config.checkpoint.every >= 0, "checkpoint.every", "0 (at the end only) or more", config.checkpoint.every),
        (config.checkpoint.keep >= 1, "checkpoint.keep", "1 or more", config.checkpoint.keep),
        (observe.histograms_every >= 0, "observe.histograms_every", "0 (off) or more", observe.histograms_every),
        (
            observe.peak_tflops is None or observe.peak_tflops > 0,
            "observe.peak_tflops",
            "more than 0",
            observe.peak_tflops,
        ),
        (observe.stall_timeout_s >= 0, "observe.stall_timeout_s", "0 (never) or more", observe.stall_timeout_s),
        (0 <= config.seed < 2**63, "seed", "0 to 2^63 - 1", config.seed),
    ]
    for holds, name, expected, found in rules:
        if not holds:
            raise ConfigError(f"--{name} has a value that makes no sense", expected=expected, found=str(found))
    if train.epochs is not None and train.steps != TrainConfig.steps:
        raise ConfigError(
            "--train.steps and --train.epochs both say how long to train",
            expected="one of them",
            found=f"--train.steps {train.steps} and --train.epochs {train.epochs:g}",
            next_step="leave one out; a config file's epochs are taken back by --train.epochs null",
        )
    if config.observe.timeline != AUTO:
        parse_window(config.observe.timeline, "observe.timeline", AUTO)
    parse_window(config.observe.profile, "observe.profile")


def _explain(error: ArgumentError, parser: ArgumentParser, argv: Sequence[str]) -> ConfigError:
    """Turn a parser's error into ours: the nearest option for one that does not exist."""
    known = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    for option, place in _options_used(argv):
        if declared_spelling(option, known) not in known and f"--{option}" not in known:
            near = difflib.get_close_matches(option, sorted(known), n=1, cutoff=0.5)
            return ConfigError(
                f"there is no option {option}{place}",
                next_step=f"did you mean {near[0]}?" if near else "see all options: hvdtrain train --help",
            )
    text = " ".join(str(error.message).split())
    wrong = re.match(r'Parser key "(?P<key>.+?)": Expected an? (?P<type>.+?)\. Got value: (?P<found>.*)', text)
    if wrong:
        expected = re.sub(r"<class '(\w+)'>|typing\.", r"\1", wrong["type"]).replace("Literal", "one of ")
        quotes = "where it stands in YAML, write it in quotes: 'off', '10:20'" if expected == "str" else None
        return ConfigError(
            f"--{wrong['key']} has a wrong value", expected=expected, found=wrong["found"], next_step=quotes
        )
    return ConfigError(f"the options do not fit: {text}", next_step="see what there is: hvdtrain train --help")


def _options_used(argv: Sequence[str]) -> list[tuple[str, str]]:
    used = [(argument.partition("=")[0], "") for argument in argv if argument.startswith("--")]
    for path in map(Path, _values_of("--config", argv)):
        used += [(f"--{key}", f" (in {path})") for key in flatten(read_yaml(path))]
    return used
