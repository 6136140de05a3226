"""How much sooner does a compressor reach the loss that stock Horovod reaches in fp32, over 1 Gbit/s?

Two hosts (see tests/support/two_hosts.py; needs root), one rank of one thread on each, the default language model and
its options, three seeds. Every contender trains for so many steps, with the same samples, and is evaluated every few
steps, off the clock. The target is the held-out loss that stock Horovod's run of the same seed has after four fifths
of its steps; the time to it is the sum of the seconds of the steps before, to the moment between two evaluations that
a straight line gives. `time_to_loss/1gbit/NAME` is that time over stock's, `final_loss` the loss after all steps over
stock's, and `best` the compressor with the lowest median. A seed's runs follow each other on the same machine.

`break_even_gbit` is the bandwidth below which a compressor reaches the loss sooner than `none`, if nothing of the way
is hidden behind backward: from the bytes that both send, the cost of coding, the steps that both need, and what a
step computes. 0 where more steps are needed than any link makes up for, at the measured cost.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import HERE, Figure, figure, main
from models import MODELS

from hvdtrain.compression.base import BucketShape
from hvdtrain.compression.coding_probe import measure_coding
from hvdtrain.compression.sizes import sent_bytes
from hvdtrain.compression.table import parse
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.exchange.reducer import BUCKET_BYTES
from tests.support.journals import read_journal
from tests.support.two_hosts import TwoHosts, two_hosts

STOCK = "stock_horovod"
OURS = ("none", "fp16", "int8", "topk:0.01", "powersgd:4")
STEPS, EVERY, AT = 100, 10, 0.8
RATE = "1gbit"
PATIENCE_S = 600


@dataclass(frozen=True)
class Run:
    """What a run came to.

    Attributes:
        step_s: seconds of each step.
        losses: held-out, by the number of steps before.
    """

    step_s: Sequence[float]
    losses: Mapping[int, float]

    def steps_to(self, target: float) -> float:
        """Steps until the loss is `target`, between two evaluations by a straight line; infinite where it never is."""
        steps = sorted(self.losses)
        for before, after in itertools.pairwise(steps):
            high, low = self.losses[before], self.losses[after]
            if low <= target:
                return before + (after - before) * max(0.0, (high - target) / (high - low))
        return float("inf")

    def seconds_to(self, target: float) -> float:
        """The same in seconds."""
        steps = self.steps_to(target)
        whole = int(min(steps, len(self.step_s)))
        rest = (steps - whole) * self.step_s[min(whole, len(self.step_s) - 1)]
        return sum(self.step_s[:whole]) + rest


def train(who: str, seed: int, hosts: TwoHosts, folder: Path) -> Run:
    """One contender with one seed, from start to end."""
    folder.mkdir()
    journal = folder / "journal.jsonl"
    if who == STOCK:
        argv = [str(HERE / "stock_run.py"), str(seed), str(STEPS), str(EVERY), str(journal)]
    else:
        argv = ["-m", "hvdtrain", f"--run_dir={folder}", f"--seed={seed}", f"--parallel.compression={who}"]
        argv += [f"--train.steps={STEPS}", f"--train.eval_every={EVERY}", "--checkpoint.every=0"]
    variables = {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    hosts.mpirun([sys.executable, *argv], cwd=folder, environment=variables, timeout_s=PATIENCE_S)
    records = read_journal(journal)
    steps = [record["step_s"] for record in records if "step_s" in record]
    losses = {record["at_step"]: record["loss"] for record in records if record.get("event") == "evaluation"}
    print(f"seed {seed}, {who}: {statistics.median(steps) * 1e3:.0f} ms a step, loss {losses[STEPS]:.4f}", flush=True)
    return Run(steps, losses)


def measure(quick: bool) -> list[Figure]:
    contenders = ("fp16", "powersgd:4") if quick else OURS
    runs: dict[str, list[Run]] = {name: [] for name in (STOCK, *contenders)}
    with tempfile.TemporaryDirectory() as scratch, two_hosts(rate=RATE) as hosts:
        for seed in range(1 if quick else 3):
            for number, name in enumerate(runs):
                runs[name].append(train(name, seed, hosts, Path(scratch) / f"{seed}-{number}"))
    targets = [run.losses[int(AT * STEPS)] for run in runs[STOCK]]
    figures, times = [], {}
    for name in contenders:
        both = list(zip(runs[name], runs[STOCK], targets, strict=True))
        label = f"time_to_loss/1gbit/{name.partition(':')[0]}"
        times[name] = [own.seconds_to(target) / stock.seconds_to(target) for own, stock, target in both]
        figures.append(figure(label, times[name], "ratio"))
        figures.append(figure(f"{label}/final_loss", [o.losses[STEPS] / s.losses[STEPS] for o, s, _ in both], "ratio"))
    best = min(contenders, key=lambda name: statistics.median(times[name]))
    print(f"the best is {best}", flush=True)
    return [*figures, figure("time_to_loss/1gbit/best", times[best], "ratio"), *break_even(runs, targets)]


def break_even(runs: Mapping[str, Sequence[Run]], targets: Sequence[float]) -> list[Figure]:
    """The bandwidths below which compression pays, in Gbit/s."""
    model = MODELS["default"]().model
    named = list(model.named_parameters())
    layouts = lay_out(assign_buckets(named, BUCKET_BYTES), dict(named), "trial")
    none_bytes, none_s = _bytes_and_cost("none", [layout.shape for layout in layouts])
    figures = []
    for name in [n for n in runs if n not in (STOCK, "none")]:
        own_bytes, own_s = _bytes_and_cost(name, [layout.shape for layout in layouts])
        gbit = []
        for own, stock, target in zip(runs[name], runs[STOCK], targets, strict=True):
            more = own.steps_to(target) / stock.steps_to(target)
            compute_s = min(own.step_s)  # the way is not quite hidden even there: a bound from above
            lost_s = more * own_s - none_s + (more - 1) * compute_s
            saved = none_bytes - more * own_bytes
            gbit.append(8e-9 * saved / lost_s if lost_s > 0 and saved > 0 else (float("inf") if saved > 0 else 0.0))
        figures.append(figure(f"time_to_loss/break_even_gbit/{name.partition(':')[0]}", gbit, "Gbit/s"))
    return figures


def _bytes_and_cost(name: str, shapes: Sequence[BucketShape]) -> tuple[float, float]:
    """What a rank of two sends in a step, and the seconds that it codes."""
    compression = parse(name)
    sent = sum(sent_bytes(compression.payload(shape.sizes, 2), 2) for shape in shapes)
    gradients = [[part.view(shape.zeros().normal_()) for part in shape.parts] for shape in shapes]
    return sent, sum(cost.total_s for cost in measure_coding(compression, shapes, gradients, 2))


if __name__ == "__main__":
    main(__doc__, measure)
