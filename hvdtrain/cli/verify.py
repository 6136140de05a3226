"""``hvdtrain verify``: check the data and the resume of a run."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cli.parser import Parser, end, local, positive, positives, run_group

if TYPE_CHECKING:
    from hvdtrain.verify.resume import Comparison

COMMANDS = {
    "data": "check that every sample of each epoch was used exactly once, across kills and resizes",
    "plan": "check the gradients of ranks that divide a model, by parameter, against one rank",
    "resume": "check that an interrupted run equals an uninterrupted one, also on other numbers of ranks",
}
_DATA_DESCRIPTION = """\
Check from a run's ledger that every sample of each epoch was used exactly
once, across kills, resumes and changed numbers of ranks. The run may still be
training."""
_DATA_EPILOG = """\
examples:
  hvdtrain verify data runs/20250301-101500-language_model

exit code: 0 if everything that can be checked is correct, 1 otherwise
"""
_RESUME_DESCRIPTION = "Check that an interrupted and resumed run equals an uninterrupted one."
_RESUME_EPILOG = """\
examples:
  hvdtrain verify resume runs/20250301-101500-language_model
  hvdtrain verify resume runs/NAME --steps 50 --sizes 1,2,4

It trains the run's config in a scratch folder, for twice N steps at a time, and
only reads the run itself. On the same number of ranks, losses, parameters and
optimizer state must be equal bit for bit; otherwise up to a tolerance.

exit code: 0 if they are equal; 1 if not, with the first step or tensor that
differs; 130 on Ctrl-C
"""
_PLAN_DESCRIPTION = """\
Compare the gradient of each parameter on ranks that divide a model with that
on one rank, in one step in fp32 on a small copy of the model: the same
modules, heads and experts, with narrow matrices. Models of other tasks than
language_model are trained as they are."""
_PLAN_EPILOG = """\
All options of hvdtrain train are accepted. Without a launcher, it starts ranks
on this host: as many as divide the model, and a copy of each.

examples:
  hvdtrain verify plan --config run.yaml
  hvdtrain verify plan --ranks 4 --parallel.ep 2 --model.preset 16b
  hvdtrain launch -np 8 -- verify plan --config run.yaml

exit code: 0 if all gradients are equal, up to the order of sums; 1 if not, with
each parameter that differs, or on an error
"""


def main(argv: list[str]) -> int:
    """Run a command of this group. Return 0, 1 if a check fails or on an error, 2 on a wrong option."""
    return run_group("verify", "RUN [OPTIONS]", COMMANDS, argv, _call)


def parser(name: str) -> Parser:
    """Declare the options of a command of this group."""
    if name == "data":
        made = Parser(prog="hvdtrain verify data", description=_DATA_DESCRIPTION, epilog=_DATA_EPILOG)
        made.add_argument("run", type=local, metavar="RUN", help="run folder")
    elif name == "plan":
        made = Parser(prog="hvdtrain verify plan", description=_PLAN_DESCRIPTION, epilog=_PLAN_EPILOG)
        help_ = "number of ranks to start (default: twice as many as divide the model, or 2)"
        made.add_argument("--ranks", type=positive, metavar="N", help=help_)
    else:
        made = Parser(prog="hvdtrain verify resume", description=_RESUME_DESCRIPTION, epilog=_RESUME_EPILOG)
        made.add_argument("run", type=local, metavar="RUN", help="run folder with the config to train")
        made.add_argument("--steps", type=positive, default=10, metavar="N", help="steps of each half (default: 10)")
        ranks = "numbers of ranks (default: 1,2)"
        made.add_argument("--sizes", type=positives, default=[1, 2], metavar="A,B", help=ranks)
    return made


def _call(name: str, argv: list[str]) -> int:
    if name == "plan":
        options, training = parser(name).parse_known_args(argv)
        return _verify_plan(options, training, argv)
    options = parser(name).parse_args(argv)
    if name == "resume":
        return _verify_resume(options.run, options.steps, options.sizes)
    from hvdtrain.verify.data import to_text, verify_data

    report = verify_data(options.run)
    print(to_text(report, options.run))
    return 1 if report.wrong else 0


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for jobs that this process starts. A signal ends them, and removes it."""
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-verify-"))
    ending = (signal.SIGTERM, signal.SIGHUP)  # they also end the jobs that this process started, as Ctrl-C does
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in ending}
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit):  # after other errors the folder keeps the output of the job
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _verify_resume(run_dir: Path, steps: int, sizes: list[int]) -> int:
    """Train, compare, print, and return the exit code."""
    from hvdtrain.verify.resume import read_config, verify_resume

    config = read_config(run_dir)  # first, so that a wrong path creates nothing
    with scratch_folder() as folder:
        compared = list(verify_resume(config, folder, steps, sizes, partial(print, flush=True)))
    print("\n" + _table(compared))
    wrong = [each for each in compared if each.first is not None]
    for each in wrong:
        print(f"WRONG: {each.name}: {each.first}")
    if wrong:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    print("the runs are equal")
    return 0


def _verify_plan(options: argparse.Namespace, training: list[str], argv: list[str]) -> int:
    """Start ranks, or compare on those of this job; print, and return the exit code."""
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.plan.refusals import resolve
    from hvdtrain.runtime.environment import NO_LAUNCHER, environ, rank_info
    from hvdtrain.runtime.tuning import prepare
    from hvdtrain.task.base import load_task_function

    function = load_task_function(task_spec(training))
    run = parse_argv(training, function)
    dimensions = resolve(run.config).dimensions
    if rank_info(environ()).launcher == NO_LAUNCHER:
        ranks = options.ranks or 2 * max(dimensions.same_samples, dimensions.ep * dimensions.pp)
        dimensions.check(ranks)
        start = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "--", "verify", "plan", *argv]
        return subprocess.run(start, check=False).returncode
    info = None
    try:
        info, _ = prepare()
        from hvdtrain.verify.plan import check_plan

        found = check_plan(run, function, info)
    except (Exception, KeyboardInterrupt) as error:
        return end(error, info)
    if info.rank == 0:
        print(found.to_text(), flush=True)
    return 1 if found.wrong else 0


def _table(compared: list[Comparison]) -> str:
    width = max(len(each.name) for each in compared)
    lines = [f"{'compared':<{width}}  {'how':<9}{'losses':>7}  {'at most':<9}{'tensors':>8}  {'at most':<9}  result"]
    for each in compared:
        how, result = "bits" if each.exact else "tolerance", "equal" if each.first is None else "WRONG"
        numbers = f"{each.steps:>7}  {each.loss:<9.2g}{each.tensors:>8}  {each.tensor:<9.2g}"
        lines.append(f"{each.name:<{width}}  {how:<9}{numbers}  {result}")
    return "\n".join(lines)
