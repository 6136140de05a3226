"""Try a change on this machine: train some steps of the run's configuration, unchanged and changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hvdtrain.errors import LaunchError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.programs import run_program
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.whatif.evidence import Change, Evidence, changed_job

STEPS = 24
"""Steps of each trial run; the first `_WARM_UP` are not counted."""
_WARM_UP = 7
_TIMEOUT_S = 1800
_END_S = 5.0
"""For mpirun to end its ranks, which have process groups of their own."""

_TAIL = 2000
_SLOWED = '''"""A task with one rank slowed down."""

from hvdtrain.task.base import slowed

task = slowed({spec!r}, {rank}, {sleep_s!r})
'''


@dataclass(frozen=True)
class Trial:
    """The folders of the unchanged runs of a trial, and the median step of each run."""

    unchanged: Sequence[Path]
    unchanged_s: Sequence[float]
    changed_s: Sequence[float]


def reasons_against(evidence: Evidence, change: Change) -> list[str]:
    """Return why a change cannot be tried on this machine; empty if it can."""
    job = changed_job(evidence, change)
    found = [
        f"--{name}: {why}"
        for name, why in (
            ("bandwidth_gbit", "needs other hosts or a throttled link"),
            ("latency_us", "needs another link"),
            ("algorithm", "is chosen by MPI"),
            ("data_ms", "needs other data"),
        )
        if getattr(change, name) is not None
    ]
    for name, ranks in (("the run", evidence.job.ranks), ("the change", job.ranks)):
        if ranks.hosts > 1:
            found.append(f"{name} needs {ranks.hosts} hosts, but this command starts jobs on one")
        elif ranks.size * evidence.threads > evidence.cores:
            found.append(
                f"{name}: {ranks.size} ranks of {evidence.threads} thread(s) need more than {evidence.cores} core(s)"
            )
    return found


def try_change(evidence: Evidence, change: Change, folder: Path, report: Callable[[str], None]) -> Trial:
    """Run unchanged, changed, changed, unchanged, in an empty folder. `report` takes a line for each run.

    Errors: LaunchError: a run failed.
    """
    jobs = {
        "unchanged": (evidence.job.ranks.size, []),
        "changed": (changed_job(evidence, change).ranks.size, trial_options(evidence, change, folder)),
    }
    seconds: dict[str, list[float]] = {"unchanged": [], "changed": []}
    folders: dict[str, list[Path]] = {"unchanged": [], "changed": []}
    for number, name in enumerate(("unchanged", "changed", "changed", "unchanged")):
        size, options = jobs[name]
        run_dir = folder / f"{number}-{name}"
        _run(trial_command(evidence.path, run_dir, size, options))
        steps = list(read_steps(RunLayout(run_dir).journal).values())[_WARM_UP:]
        seconds[name].append(median(step["step_s"] for step in steps))
        folders[name].append(run_dir)
        report(f"{name}: {seconds[name][-1] * 1e3:.1f} ms per step, the median of {len(steps)}")
    return Trial(folders["unchanged"], seconds["unchanged"], seconds["changed"])


def trial_command(path: Path, run_dir: Path, size: int, options: Sequence[str]) -> list[str]:
    """Return the command that trains some steps of a run's configuration on this machine."""
    program = ["hvdtrain.cli.start", "-np", str(size), "--"] if size > 1 else ["hvdtrain"]
    return [
        *(sys.executable, "-m", *program, "--config", str(RunLayout(path).config), f"--run_dir={run_dir}"),
        *("--resume=never", f"--train.stop_at={STEPS}", "--checkpoint.every=0", "--train.eval_samples=1"),
        *("--observe.tensorboard=false", "--observe.timeline=auto", "--observe.profile=off", *options),
    ]


def trial_options(evidence: Evidence, change: Change, folder: Path) -> list[str]:
    """Return the options of training that make the change; a slow rank needs a file in `folder`, which is written."""
    found = []
    for name, option in (
        ("compression", "parallel.compression"),
        ("bucket_mib", "parallel.bucket_mib"),
        ("global_batch", "train.global_batch"),
    ):
        if (value := getattr(change, name)) is not None:
            found.append(f"--{option}={value}")
    if change.engine or change.shard:
        engine, shard = changed_job(evidence, change).plan.engine_and_shard
        found += [f"--parallel.engine={engine}", f"--parallel.shard={shard}"]
    if change.slow_rank_percent:
        parts, passes = evidence.parts_s, evidence.job.passes
        pass_s = (parts["copy"] + parts["forward"] + parts["backward"]) / passes
        file = folder / "slowed.py"
        rank = changed_job(evidence, change).ranks.size - 1
        spec = str(RunLayout(evidence.path).read_config()["task"])
        file.write_text(_SLOWED.format(spec=spec, rank=rank, sleep_s=pass_s * change.slow_rank_percent / 100))
        found.append(f"--task={file}:task")
    return found


def _run(argv: Sequence[str]) -> None:
    try:
        done = run_program(argv, _TIMEOUT_S, end_s=_END_S)
    except TimeoutError as error:
        raise LaunchError(f"a trial run took too long: {' '.join(argv)}", found=str(error)) from None
    if done.code:
        raise LaunchError(
            f"a trial run ended with exit code {done.code}: {' '.join(argv)}",
            found=(done.out + done.err)[-_TAIL:].strip(),
            next_step="run this command in the folder in which the run was started",
        )
