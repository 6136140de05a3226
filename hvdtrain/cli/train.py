"""``hvdtrain train``, the default subcommand."""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from hvdtrain.cli.parser import EXIT_OF_SIGNAL, end, show
from hvdtrain.config.spelling import declared_spelling
from hvdtrain.observe.output import FailureOutput, duration, make_output_unfailing, table
from hvdtrain.observe.shell_commands import command_line, relative_to_start, resume_command
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.driver_client import NoPlace
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import prepare, prepare_timeline

if TYPE_CHECKING:
    from hvdtrain.training.result import Result

_PRINT = ("--print_config",)


def main(argv: list[str]) -> int:
    """Parse the options, train, and print a summary.

    Returns:
        0; 1 on an error; 2 on one that would recur, such as a wrong option or task (`hvdtrain.errors.USAGE`);
        124 if the watchdog ended a run without progress; 128 + number if a signal ended it.
    """
    make_output_unfailing()
    info: RankInfo | None = None
    output = FailureOutput(show)
    try:
        info, _ = prepare()
        with _saying_if_slow(info):
            result = _train(argv, info, output)
    except NoPlace:  # the driver reports the reason
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return end(error, info, output)
    except SystemExit as error:
        if not output.reported:  # from argparse, after --help
            raise
        return end(error, info, output)
    if result.reason in EXIT_OF_SIGNAL:  # everything is saved; srun may send it when another rank ends
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if info.rank == 0:
        print(summary(result, info))
    return EXIT_OF_SIGNAL.get(result.reason, 0)


_SLOW_S = 10.0
_PHASES = {
    "load_task_function": "importing torch and the task",
    "start_rounds": "starting Horovod and waiting for all ranks",
    "make_task": "making the task's model and data",
    "build_engine": "giving all ranks the same model",
    "resume_state": "giving all ranks the state of the run",
    "run_training": "",
    "_train": "importing torch",
}
"""What a start is doing inside of a function of hvdtrain; "" where it shows lines of its own."""


@contextmanager
def _saying_if_slow(info: RankInfo) -> Iterator[None]:
    """Say once on rank 0 what a start is doing that takes long."""
    main = threading.get_ident()
    timer = threading.Timer(_SLOW_S, lambda: _say_phase(sys._current_frames().get(main)))
    timer.daemon = True
    if info.rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_phase(frame: FrameType | None) -> None:
    while frame is not None:
        doing = _PHASES.get(frame.f_code.co_name)
        if doing is not None and frame.f_globals.get("__name__", "").startswith("hvdtrain."):
            if doing:
                show(f"hvdtrain: still starting after {_SLOW_S:.0f} s: rank 0 is {doing}\n")
            return
        frame = frame.f_back


def _train(argv: list[str], info: RankInfo, output: FailureOutput) -> Result:
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.plan.plan import plan_of
    from hvdtrain.plan.refusals import resolve
    from hvdtrain.task.base import load_task_function

    function = load_task_function(task_spec(argv))
    checked = [word for word in argv if declared_spelling(word, _PRINT).partition("=")[0] not in _PRINT]
    run = parse_argv(checked, function)
    if len(checked) < len(argv):  # the parser prints without all checks, and exits
        resolve(run.config)
        parse_argv(argv, function)
    logging.basicConfig(format="hvdtrain: %(message)s", stream=sys.stderr)
    logging.getLogger("hvdtrain").setLevel(run.config.log_level.upper())

    from hvdtrain.comm.rounds import start_rounds
    from hvdtrain.training.session import run_training

    timeline = prepare_timeline(run.config.observe.timeline, info)
    plan = plan_of(run.config)
    rounds = start_rounds(info, plan.groups, horovod=plan.by_horovod)
    return run_training(run, partial(function, **run.task_args), rounds, timeline, info, output=output)


def summary(result: Result, info: RankInfo) -> str:
    """Return the text at the end of a run: where the time went, then losses, run folder and the next commands.

    The commands are last and the losses just before, because a terminal shows the end.
    """
    from hvdtrain.timeline.report.terminal import summary_lines

    run_dir = relative_to_start(result.run_dir, info)
    layout, there = RunLayout(run_dir), RunLayout(result.run_dir)
    rows = [("training loss", f"{result.first_loss:.4f} -> {result.last_loss:.4f}")]
    if not math.isnan(result.first_heldout_loss):
        rows.append(("held-out loss", f"{result.first_heldout_loss:.4f} -> {result.last_heldout_loss:.4f}"))
    rows += [(name, f"{value:.4f} on held-out samples") for name, value in result.metrics.items()]
    rows += [("best", result.best)] if result.best else []
    if not math.isnan(result.tokens_per_s):
        least, most = min(sizes := result.sizes or [info.size]), max(sizes)
        on = f"on {most} rank(s)" if least == most else f"on {least} to {most} ranks, mean over all rounds"
        rows.append(("speed", f"{result.tokens_per_s:,.0f} {result.unit}/s {on}"))
    if len(result.sizes) > 1:
        rows.append(("ranks", f"{' -> '.join(map(str, result.sizes))}; {result.still_s:.1f} s without a step"))
    texts = (("cost", result.cost), ("goodput", result.goodput), ("promise", result.promise))
    rows += [(name, text) for name, text in texts if text]
    rows.append(("run folder", str(run_dir)))
    how = {"finished": "finished", "stop_at": "stopped as asked"}.get(result.reason, "ended")
    if result.reason in EXIT_OF_SIGNAL:
        how = f"stopped by {result.reason}{' (Ctrl-C)' if result.reason == 'SIGINT' else ''}"
    commands = []
    if result.analysis is not None:
        commands.append(("report", f"{layout.timeline.report_page} (open in a browser)"))
    if there.tensorboard.is_dir():
        # On this machine's own address: everybody who reaches the port can read the run.
        curves = command_line("tensorboard", "--logdir", str(layout.tensorboard), "--host", "127.0.0.1")
        commands.append(("curves", curves))
    if there.timeline.folder.is_dir():
        commands.append(("traces", f"{layout.timeline.folder}/*.json (open in https://ui.perfetto.dev)"))
    commands.append(("last steps", command_line("tail", "-n", "3", str(layout.journal))))
    commands.append(("check machine", command_line("hvdtrain", "doctor")))
    # After stop_at, the run's config has the stop, so the command removes it.
    again = {"finished": ("train longer", result.train_on), "stop_at": ("continue", "--train.stop_at null")}
    title, options = again.get(result.reason, ("resume", ""))
    commands.append((title, resume_command(result.run_dir, info, options)))
    head = f"{how} at step {result.step} of {result.total_steps} after {duration(result.seconds)}"
    if how == "ended":
        head += f": {result.reason}"
    times = summary_lines(result.analysis) if result.analysis is not None else _time_budget(result.budget)
    return "\n".join(["", *times, "", head, table(rows), "next:", table(commands)])


def _time_budget(budget: Mapping[str, float]) -> list[str]:
    """Format the wall time by parts, from the journal, for a run without traces."""
    whole = sum(budget.values())
    if not whole:
        return []
    rows = [
        (part, f"{seconds:9.2f} s {seconds / whole:6.1%}  {'#' * round(40 * seconds / whole)}".rstrip())
        for part, seconds in budget.items()
    ]
    return ["where the time went (rank 0):", table(rows)]
