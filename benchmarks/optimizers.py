"""In how many steps does Muon reach the loss of AdamW, and which share of its update does a rank compute?

The default task on 2 ranks of 1 thread; AdamW's state is whole, Muon's divided. Learning rates first: each optimizer
trains with each of `RATES` on two seeds, and keeps the one with the lowest mean of the final held-out losses. Then both
train `STEPS` steps with five other seeds. `optimizers/muon_steps_to_adamw_loss` is the number of steps after which
Muon's held-out loss is that of AdamW at the end, over `STEPS`; between two evaluations by a straight line, infinite
where it never is. Both have the same schedule over the same steps, which Muon has not ended at that moment. So a third
run trains Muon for `SHORT` of the steps: `..._short` is its final loss minus that of AdamW after all steps.

`optimizers/muon_step_share` is the time of the optimizer in a step at 2 ranks with `shard optimizer`, over that of 1
rank which has all: by rank 0's journal, in turns of seconds (see jobs.py).

Losses do not depend on what else the machine does. With `--runs FOLDER`, a second start resumes where one ended.

--quick: fewer steps, one seed, the default learning rates.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

from common import Figure, figure, options, ratios, report
from jobs import Job, Setting, mpirun, race
from time_to_loss import Run

from hvdtrain import Config
from hvdtrain.config.schema import LEARNING_RATES
from tests.support.journals import read_journal

STEPS, QUICK_STEPS = 400, 100
SHORT = 0.65
EVERY = 0.05
"""Steps between two evaluations, as a fraction of all."""
OPTIMIZERS = {"adamw": "none", "muon": "optimizer"}
"""With what is divided among ranks."""
RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (4e-3, 8e-3, 16e-3)}
SEARCH_SEEDS, SEEDS = (100, 101), range(5)
PATIENCE_S = 3600.0
WARM_UP, TURN_S = 4, 8.0


def train(runs: Path, name: str, lr: float, seed: int, steps: int) -> Run:
    """Return the losses of one run; what `runs` has of it is not trained again."""
    run = runs / f"{name}-{lr:g}-{seed}-{steps}"
    options = [f"--run_dir={run}", f"--seed={seed}", f"--optimizer.name={name}", f"--optimizer.lr={lr}"]
    options += [f"--parallel.shard={OPTIMIZERS[name]}", f"--train.steps={steps}", "--checkpoint.keep=1"]
    options += [f"--train.eval_every={max(1, round(EVERY * steps))}", "--observe.timeline=off"]
    mpirun(name, ["-m", "hvdtrain", *options], {}, PATIENCE_S)
    records = read_journal(run / "journal.jsonl")
    losses = {record["at_step"]: record["loss"] for record in records if record.get("event") == "evaluation"}
    print(f"{name}, lr {lr:g}, seed {seed}: loss {losses[steps]:.4f} after {steps} steps", flush=True)
    return Run([record["step_s"] for record in records if "step_s" in record], losses)


def best_rate(runs: Path, name: str, steps: int) -> float:
    """Return the learning rate with the lowest final loss."""

    def loss(lr: float) -> float:
        return statistics.mean(train(runs, name, lr, seed, steps).losses[steps] for seed in SEARCH_SEEDS)

    return min(RATES[name], key=loss)


def steps_to_loss(runs: Path, *, quick: bool) -> list[Figure]:
    steps = QUICK_STEPS if quick else STEPS
    rates = {name: LEARNING_RATES[name] if quick else best_rate(runs, name, steps) for name in OPTIMIZERS}
    shares, losses, short = [], [], []
    for seed in SEEDS[:1] if quick else SEEDS:
        adamw, muon = (train(runs, name, rates[name], seed, steps) for name in OPTIMIZERS)
        shares.append(muon.steps_to(adamw.losses[steps]) / steps)
        losses.append(muon.losses[steps] - adamw.losses[steps])
        early = train(runs, "muon", rates["muon"], seed, round(SHORT * steps))
        short.append(early.losses[round(SHORT * steps)] - adamw.losses[steps])
    return [
        figure("optimizers/muon_steps_to_adamw_loss", shares, "ratio"),
        figure("optimizers/muon_loss_minus_adamw_loss", losses, "nats"),
        figure("optimizers/muon_loss_minus_adamw_loss_short", short, "nats"),
        *(figure(f"optimizers/{name}_learning_rate", [rate], "lr") for name, rate in rates.items()),
    ]


def optimizer_s(job: Job) -> float:
    return statistics.median(step["optimizer_s"] for step in job.turn(TURN_S))


def step_share(*, quick: bool) -> list[Figure]:
    train_ = Config().train
    passes = train_.global_batch // train_.micro_batch
    setting = partial(Setting, "default", train_.micro_batch, optimizer={"name": "muon"})
    settings = {
        "whole": setting(passes=passes, ranks=1),
        "divided": setting(passes=passes // 2, ours={"parallel.shard": "optimizer"}),
    }
    starts, rounds = (1, 2) if quick else (3, 3)
    found = race(tuple(settings), settings, optimizer_s, rounds=rounds, warm_up=WARM_UP, starts=starts)
    milliseconds = (figure(f"optimizers/muon_{name}_ms", [1e3 * s for s in found[name]], "ms") for name in found)
    return [figure("optimizers/muon_step_share", ratios(found["divided"], found["whole"]), "ratio"), *milliseconds]


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep runs there, and resume those that are there")
    arguments = parser.parse_args()
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as folder:
        losses = steps_to_loss(arguments.runs or Path(folder), quick=quick)
    report([*losses, *step_share(quick=quick)], arguments.json)
