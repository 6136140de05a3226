"""`hvdtrain.train(config, task)`: train a task from a Python program."""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.config import parse
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError
from hvdtrain.files import allow_open_files
from hvdtrain.observe.sinks import Record, Sink
from hvdtrain.runtime.driver_client import NoPlace
from hvdtrain.runtime.tuning import prepare, prepare_timeline
from hvdtrain.task.base import Task, TaskFunction, load_task_function
from hvdtrain.training.callbacks.base import Callback
from hvdtrain.training.result import Result
from hvdtrain.yaml_file import read_yaml


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    task: Task | TaskFunction | None = None,
    *,
    sinks: Sequence[Sink | Callable[[Record], object]] = (),
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train on all ranks of this job. Collective: yes.

    Args:
        config: options as a `Config`, a nested dict such as ``{"train": {"steps": 50}}``, or a YAML file.
        task: a `Task`; a function that returns one (`config` may set its parameters); or None for the task that
            `config` names. A `Task` object starts a new run each time, unless `run_dir` names one.
        sinks: receive each step and event on rank 0, in addition to the journal: functions of one record, or objects
            with ``write(record)`` and ``close()`` (`hvdtrain.observe.sinks.Sink`).
        callbacks: called at each step, evaluation and checkpoint, on every rank (`hvdtrain.Callback`).

    Errors:
        HvdtrainError: see `hvdtrain.errors`. On one rank or on all; end the process then, so that the launcher ends
            the others.
        SystemExit: with 0, if an elastic job continues or ends without this process.
    """
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "train() was called while a loader process imported the script",
            next_step='put the call under `if __name__ == "__main__":`',
        )
    allow_open_files()
    info, choices = prepare()
    options = _options(config)
    build: Callable[[], Any]
    if isinstance(task, Task):
        options["task"] = "Task"
        if options.get("run_dir") is None:
            options["resume"] = "never"  # nothing distinguishes this Task from others with the same config
        run = parse.parse_object(options, None)
        build = partial(lambda given: given, task)
    else:
        if task is not None:
            options["task"] = f"{task.__module__}:{getattr(task, '__qualname__', type(task).__name__)}"
        function = task or load_task_function(str(options.get("task", Config.task)))
        # Only a plain function has parameters that options can set; a partial does not.
        run = parse.parse_object(options, function if inspect.isfunction(function) else None)
        build = partial(function, **run.task_args)

    from hvdtrain.comm.rounds import start_rounds
    from hvdtrain.plan.plan import plan_of
    from hvdtrain.training.session import run_training
    from hvdtrain.training.start.device import set_torch_threads

    set_torch_threads(choices)
    timeline = prepare_timeline(run.config.observe.timeline, info)
    try:
        plan = plan_of(run.config)
        rounds = start_rounds(info, plan.groups, horovod=plan.by_horovod)
        return run_training(run, build, rounds, timeline, info, sinks, callbacks=callbacks)
    except NoPlace:
        sys.exit(0)


def _options(config: Config | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(config, Config):
        return asdict(config)
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    if isinstance(config, (str, Path)):
        options = read_yaml(Path(config))
        folder = parse.run_folder_of_config(Path(config), options.get("resume", Config.resume))
        return {**options, "run_dir": folder} if folder else options
    raise ConfigError(
        "config is of the wrong type",
        expected="a hvdtrain.Config, a dict, or the path of a YAML file",
        found=type(config).__name__,
    )
