"""Trials of a search, each a run, and what they found: a table, the best config, and TensorBoard's HParams.

optuna chooses the values, and remembers trials in a file of JSON lines that survives kills. A trial that was
interrupted is continued: its run folder follows from its values.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.past_journal import is_finished, journal_lines
from hvdtrain.programs import end_group
from hvdtrain.run_layout import RunLayout
from hvdtrain.task.base import import_library
from hvdtrain.tune.space import Space
from hvdtrain.yaml_file import yaml_text

STUDY = "study.jsonl"
_POLL_S = 0.5
_PATIENCE_S = 60.0
"""How long a trial that is stopped early may take to save and end."""
_RANDOM = 5
"""Trials before optuna's sampler and pruner rely on the others."""
EARLY = "stopped early: worse than the median of the others at that step"


@dataclass(frozen=True)
class Tried:
    """A trial."""

    values: Mapping[str, Any]  # of the options
    folder: Path  # of its run
    value: float | None  # what was measured; None if the trial did not end, or failed
    why: str  # "" if it ran to its end, else why not


def search(
    folder: Path,
    space: Space,
    command: Sequence[str],
    *,
    trials: int,
    measure: str,
    seed: int,
    say: Callable[..., None],
) -> list[Tried]:
    """Run trials until there are `trials`, with those of earlier starts; return all.

    `folder` is new, or has a search with the same space and measure. A trial adds its options to `command`. `measure`
    is "loss", the held-out loss at the end, or "step_s", the median seconds of a step.

    Errors: RunDirectoryError: the folder has another search.
    """
    optuna = import_library("optuna", "hvdtrain tune", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    states = optuna.trial.TrialState
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="hvdtrain",
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / STUDY))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=_RANDOM),
        load_if_exists=True,
    )
    # A sampler forgets where it was: with the same seed again, it would repeat its first choices.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.get_trials()), n_startup_trials=_RANDOM)
    _check_identity(study, folder, {"space": [*map(str, space)], "measure": measure, "command": [*command]})
    for trial in study.get_trials(states=[states.RUNNING]):  # of a search that was killed
        study.tell(trial.number, state=states.FAIL)
        study.enqueue_trial(trial.params)
    while len(done := [trial for trial in study.get_trials() if "why" in trial.user_attrs]) < trials:
        trial = study.ask()
        values = {each.name: each.suggest(trial) for each in space}
        run = folder / run_name(values)
        value, why = _train(trial, [*command, *options(values), f"--run_dir={run}"], run, measure)
        for name, fact in (("folder", str(run)), ("value", value), ("why", why)):
            trial.set_user_attr(name, fact)
        state = {"": states.COMPLETE, EARLY: states.PRUNED}.get(why, states.FAIL)
        study.tell(trial, value if state is states.COMPLETE else None, state=state)
        result = why or f"{measure} {value:.5g}"
        say(f"trial {len(done) + 1} of {trials}: {' '.join(options(values))}: {result}")
    facts = [(trial.params, trial.user_attrs) for trial in done]
    return [Tried(values, Path(each["folder"]), each["value"], each["why"]) for values, each in facts]


def options(values: Mapping[str, Any]) -> list[str]:
    """Return the options of a trial."""
    return [
        f"--{name}={value:.6g}" if isinstance(value, float) else f"--{name}={value}" for name, value in values.items()
    ]


def run_name(values: Mapping[str, Any]) -> str:
    """Return the name of a trial's run folder: equal values have the same run."""
    return "trial-" + hashlib.sha256("\n".join(options(values)).encode()).hexdigest()[:12]


def _check_identity(study: Any, folder: Path, identity: Mapping[str, Any]) -> None:
    known = study.user_attrs.get("search", identity)
    for name, value in identity.items():
        if known[name] != value:
            raise RunDirectoryError(
                f"{folder} has a search with another {name}",
                expected=str(known[name]),
                found=str(value),
                next_step="choose another --folder, or repeat the command of that search",
            )
    study.set_user_attr("search", dict(identity))


def _train(trial: Any, argv: Sequence[str], run: Path, measure: str) -> tuple[float | None, str]:
    """Train until the end, or until the trial is worse than most; return the value, and why there is none.

    A run that an earlier search has finished is not trained again.
    """
    journal, reported = RunLayout(run).journal, set[int]()
    if not (journal.exists() and is_finished(journal)):
        run.mkdir(parents=True, exist_ok=True)
        with (run.parent / f"{run.name}.log").open("ab") as log:
            job = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            try:
                while job.poll() is None:
                    _report(trial, journal, reported)
                    if measure == "loss" and trial.should_prune():
                        return None, EARLY
                    time.sleep(_POLL_S)
            finally:
                end_group(job, _PATIENCE_S)
        if job.returncode:
            return None, f"failed with exit code {job.returncode}, see {log.name}"
    _report(trial, journal, reported)  # later trials are compared with it
    found = _measured(journal, measure)
    return (found, "") if found is not None else (None, "no finite value")


def _report(trial: Any, journal: Path, reported: set[int]) -> None:
    for line in journal_lines(journal) if journal.exists() else ():
        if line.get("event") == "evaluation" and _is_finite(line.get("loss")) and line["at_step"] not in reported:
            trial.report(line["loss"], line["at_step"])
            reported.add(line["at_step"])


def _measured(journal: Path, measure: str) -> float | None:
    lines = [*journal_lines(journal)]
    if measure == "loss":
        losses = [line["loss"] for line in lines if line.get("event") == "evaluation" and "loss" in line]
        return losses[-1] if losses and _is_finite(losses[-1]) else None
    seconds = [line["step_s"] for line in lines if "event" not in line and _is_finite(line.get("step_s"))]
    return statistics.median(seconds[len(seconds) // 2 :]) if seconds else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def table(tried: Sequence[Tried], measure: str) -> list[str]:
    """Return a line for each trial, the best first."""
    order = sorted(tried, key=lambda each: math.inf if each.value is None else each.value)
    return [f"{measure:>10}  options"] + [
        f"{'-' if each.value is None else format(each.value, '.5g'):>10}  {' '.join(options(each.values))}"
        + (f"  ({each.why})" if each.why else "")
        for each in order
    ]


def best_yaml(tried: Sequence[Tried], measure: str) -> str | None:
    """Return the config of the best trial, without its run folder, with all trials as comments; None if all failed."""
    known = [each for each in tried if each.value is not None]
    if not known:
        return None
    best = min(known, key=lambda each: float(each.value or 0.0))
    config = RunLayout(best.folder).read_config()
    config.pop("run_dir", None)
    lines = [f"# {line}" for line in (f"The best of {len(tried)} trials by {measure}; run: {best.folder}",
                                      *table(tried, measure))]  # fmt: skip
    return "\n".join(lines) + "\n" + yaml_text(config)


def write_hparams(tried: Sequence[Tried], folder: Path, measure: str) -> None:
    """Write the trials for TensorBoard's HParams, if TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return
    with SummaryWriter(str(folder)) as writer:
        for each in tried:
            if each.value is not None:
                writer.add_hparams(dict(each.values), {measure: each.value}, run_name=each.folder.name)
