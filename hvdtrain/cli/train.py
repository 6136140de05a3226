"""``hvdtrain train``, the default subcommand."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.observe.progress import duration, table
from hvdtrain.runtime.environment import RankInfo, rank_label
from hvdtrain.runtime.timeline import prepare_timeline
from hvdtrain.runtime.tuning import prepare

if TYPE_CHECKING:
    from hvdtrain.training.result import Result

_EXIT_OF_SIGNAL = {"SIGTERM": 143, "SIGINT": 130}
_RANK_0_SPEAKS_S = 5.0
_BAR = 40
"""Characters that stand for the whole time."""


def main(argv: list[str]) -> int:
    """Parse, train, print a summary; 0, 1 on an error, 2 on a wrong option, 128 + number where a signal ended it."""
    info: RankInfo | None = None
    try:
        info, _ = prepare()
        result = _train(argv, info)
    except HvdtrainError as error:
        return _fail(_report(error, info), 2 if isinstance(error, ConfigError) else 1, info, error.everywhere)
    except KeyboardInterrupt:
        return _fail("hvdtrain: interrupted\n", _EXIT_OF_SIGNAL["SIGINT"], info)
    except Exception:
        label = f" on {rank_label(info)}" if info else ""
        return _fail(f"{traceback.format_exc()}hvdtrain: unexpected error{label}, see above\n", 1, info)
    if info.rank == 0:
        print(summary(result, info))
    return _EXIT_OF_SIGNAL.get(result.reason, 0)


def _train(argv: list[str], info: RankInfo) -> Result:
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.task.base import load_task_function

    function = load_task_function(task_spec(argv))
    run = parse_argv(argv, function)
    logging.basicConfig(format="hvdtrain: %(message)s", stream=sys.stderr)
    logging.getLogger("hvdtrain").setLevel(run.config.log_level.upper())

    from hvdtrain.comm.start import start_comm
    from hvdtrain.training.session import run_training

    timeline = prepare_timeline(run.config.observe.timeline, info)
    return run_training(run, partial(function, **run.task_args), start_comm(info), timeline)


def summary(result: Result, info: RankInfo) -> str:
    """What a person wants to know at the end."""
    rows = [("training loss", f"{result.first_loss:.4f} -> {result.last_loss:.4f}")]
    if not math.isnan(result.first_heldout_loss):
        rows.append(("held-out loss", f"{result.first_heldout_loss:.4f} -> {result.last_heldout_loss:.4f}"))
    if not math.isnan(result.tokens_per_s):
        rows.append(("speed", f"{result.tokens_per_s:,.0f} {result.unit}/s on {info.size} rank(s)"))
    rows.append(("run", str(result.run_dir)))
    how = {"finished": "finished", "stop_at": "stopped as asked"}.get(result.reason, f"stopped by {result.reason}")
    further = []
    if (result.run_dir / "tensorboard").is_dir():
        # The address of this machine only: whoever reaches the port reads the run.
        further.append(("curves", f"{_beside('tensorboard')} --logdir {result.run_dir}/tensorboard --host 127.0.0.1"))
    if (result.run_dir / "timeline").is_dir():
        further.append(("traces", f"{result.run_dir}/timeline/*.json, in https://ui.perfetto.dev or chrome://tracing"))
    further += [
        ("each step", f"tail -n 3 {result.run_dir}/journal.jsonl"),
        ("this machine", f"{_beside('hvdtrain')} doctor"),
    ]
    again = f"{_beside('python')} -m hvdtrain --config {result.run_dir}/config.yaml --run_dir {result.run_dir}"
    if info.size > 1:
        again = f"{_beside('mpirun')} -np {info.size} {again}"
    if result.reason == "finished":
        further.append(("train on", f"{again} --train.steps {2 * result.total_steps}"))
    else:
        further.append(("go on", f"{again} --train.stop_at null"))
    head = f"{how} at step {result.step} of {result.total_steps} after {duration(result.seconds)}"
    return f"\n{head}\n{table(rows)}\n{_where_it_went(result.budget)}look further:\n{table(further)}"


def _where_it_went(budget: Mapping[str, float]) -> str:
    whole = sum(budget.values())
    if not whole:
        return ""
    rows = [
        (part, f"{seconds:9.2f} s {seconds / whole:6.1%}  {'#' * round(_BAR * seconds / whole)}".rstrip())
        for part, seconds in budget.items()
    ]
    return f"where the time went (rank 0):\n{table(rows)}\n"


def _beside(name: str) -> str:
    """A program as a shell finds it that is not in the environment: beside this interpreter, where it is there."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _report(error: HvdtrainError, info: RankInfo | None) -> str:
    label = f" on {rank_label(info)}" if info and info.size > 1 else ""
    return f"hvdtrain: {type(error).__name__}{label}: {error}\n"


def _fail(text: str, code: int, info: RankInfo | None, everywhere: bool = False) -> int:
    """Say why on stderr; among several ranks end at once, so that the launcher ends the others."""
    several = info is not None and info.size > 1
    if several and everywhere and info is not None and info.rank != 0:
        # Rank 0 says it, and its end is ours; going first could end it before it has spoken. Who is still there
        # after that was alone with the error.
        time.sleep(_RANK_0_SPEAKS_S)
    sys.stderr.write(text)
    sys.stderr.flush()
    sys.stdout.flush()
    if several:
        # Leaving the usual way would wait for the other ranks in Horovod's shutdown, and they for this one.
        os._exit(code)
    return code
