"""Search for options of training with optuna: each trial is a job of `hvdtrain launch`.

    pip install optuna
    python examples/tune.py 12 --train.steps 200     # 12 trials; the same command continues the search

What follows the number of trials is the same in all of them. Change FOLDER, RANKS and `suggest` to your needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna

FOLDER = Path("tune")
RANKS = 2


def suggest(trial: optuna.Trial) -> list[str]:
    """Return the options of a trial."""
    compression = trial.suggest_categorical("parallel.compression", ["none", "fp16"])
    return [f"optimizer.lr={trial.suggest_float('lr', 1e-4, 1e-2, log=True)}", f"parallel.compression={compression}"]


def train(trial: optuna.Trial, training: list[str]) -> float:
    """Train, and return the held-out loss at the end."""
    options = suggest(trial)
    run = FOLDER / ",".join(options)  # equal options have the same run: a trial that was killed resumes
    command = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(RANKS), "--", *training]
    subprocess.run([*command, *(f"--{option}" for option in options), f"--run_dir={run}"], check=True)
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    # To find the fastest options, return the median of line["step_s"] over the lines without "event".
    return float([line["loss"] for line in lines if line.get("event") == "evaluation"][-1])


def main(trials: int, training: list[str]) -> None:
    """Search until there are `trials` that did not fail."""
    FOLDER.mkdir(exist_ok=True)
    study = optuna.create_study(storage=f"sqlite:///{FOLDER}/study.db", study_name="tune", load_if_exists=True)
    for killed in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(killed.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(killed.params)
    done = len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE]))
    if done < trials:
        study.optimize(lambda trial: train(trial, training), trials - done, catch=subprocess.CalledProcessError)
    print(f"the best of {trials} trials: loss {study.best_value:.5g} with {study.best_params}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
