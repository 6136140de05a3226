"""A soak: ranks of an elastic run are struck at random for minutes; the loss curve beside that of an undisturbed run.

Three ranks of one host train a toy task of some 80 ms a step under `hvdtrain launch`; about every `GAP_S` seconds, one
of them gets SIGKILL, SIGSTOP or SIGTERM, at whatever it is doing (`--seed` says who, what and when; the longest-lived
one seldom, so that it can be seen whether a process grows over many rounds). At the end every step has to be there with
the loss of one rank that nobody struck, each sample once, and no process, and nothing may have grown.

    python benchmarks/soak.py --minutes 30 --json results.json --picture docs/soak.svg
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from common import Figure, content, figure, options, print_table, pyplot

from hvdtrain.files import write_text
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.verify.data import verify_data
from tests.support.chaos import LAUNCH, RANK, ROOT, TASK
from tests.support.launch import ENVIRONMENT

RANKS, GAP_S, LOOK_S, STEP_S, PACE_S = 3, 12.0, 1.0, 0.085, 0.075
SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM")
SPARED = 0.85
"""Of the strikes that would befall the longest-lived rank, those that befall another."""

WORST = 1e-4
"""Relative difference of a loss: sums of floats in another order, over tens of thousands of steps."""

MARK = "HVDTRAIN_SOAK"
POINTS = 300
"""Of a curve in the picture, each the mean of its steps."""


@dataclass
class EvaluationProgress:
    """What a process had, each second of its life."""

    name: str
    looks: list[tuple[float, int, int]] = field(default_factory=list)
    """Each: MiB resident, threads, file descriptors."""

    def grown(self) -> tuple[float, int, int]:
        """From a third of its life, when it had trained for a while, to the last look."""
        first, last = self.looks[len(self.looks) // 3], self.looks[-1]
        return round(last[0] - first[0], 1), last[1] - first[1], last[2] - first[2]


class Soak:
    """One job and who strikes it: about every `gap_s`, with one of `signals`."""

    def __init__(
        self,
        folder: Path,
        train: list[str],
        seed: int,
        *,
        ranks: int = RANKS,
        gap_s: float = GAP_S,
        pace_s: float = PACE_S,
        signals: Sequence[str] = SIGNALS,
    ) -> None:
        self._ranks_wanted, self._gap_s, self._pace_s, self._signals = ranks, gap_s, pace_s, signals
        self.folder, self.run = folder, folder / "run"
        self.strikes: list[dict[str, Any]] = []
        self.seen: dict[int, EvaluationProgress] = {}
        self._random = random.Random(seed)
        self._mark = str(folder)
        self._train = train

    def train(self, strike_s: float) -> int:
        """Run it to its end, striking for so many seconds; the exit code."""
        rank = [sys.executable, str(RANK), str(self.folder / "order"), str(self._pace_s), *self._train]
        ranks = self._ranks_wanted
        options = ["-np", str(ranks), "--elastic", f"1:{ranks}", "--restarts", "100"]
        launch = [sys.executable, "-c", LAUNCH, json.dumps([*rank, f"--run_dir={self.run}"]), *options]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), MARK: self._mark}
        with (self.folder / "said").open("w") as said:
            command = [*launch, "--events", str(self.folder / "events")]
            driver = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=said, stderr=said)
            began = time.time()
            strike_at = time.time() + self._gap_s
            while driver.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(LOOK_S)
                self._look(driver.pid)
                if strike_at <= time.time() < began + strike_s:
                    self._strike()
                    strike_at = time.time() + self._random.expovariate(1 / self._gap_s)
        return driver.returncode

    def left(self) -> list[psutil.Process]:
        """Processes of the job that are still there."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def rounds(self) -> list[int]:
        """Sizes of all rounds."""
        events = map(json.loads, (self.folder / "events").read_text().splitlines())
        return [event["size"] for event in events if event["event"] == "round"]

    def _ranks(self) -> list[psutil.Process]:
        """Those that have trained for a while, the longest-lived first."""
        ranks = [p for p in self.left() if str(RANK) in p.cmdline()[:3]]
        return sorted(ranks, key=lambda process: process.create_time())

    def _strike(self) -> None:
        ranks = self._ranks()
        if len(ranks) < 2:
            return
        spare = self._random.random() < SPARED
        victim = self._random.choice(ranks[1:] if spare else ranks)
        name = self._random.choice(self._signals)
        with suppress(psutil.Error):
            victim.send_signal(signal.Signals[name])
            self.strikes.append({"time": time.time(), "signal": name, "oldest": victim == ranks[0]})
            print(f"{len(self.strikes):>4} {name} to {victim.pid}, {len(ranks)} live", flush=True)

    def _look(self, driver: int) -> None:
        for process in self.left():
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                name = "driver" if process.pid == driver else "agent" if "launch.agent" in command else "rank"
                looks = self.seen.setdefault(process.pid, EvaluationProgress(name)).looks
                mib = process.memory_info().rss / 2**20
                looks.append((round(mib, 1), process.num_threads(), process.num_fds()))


def task(steps: int, further: Sequence[str]) -> list[str]:
    """What is trained: so slowly that its loss still falls at the end."""
    return [*TASK, f"--train.steps={steps}", "--checkpoint.every=200", f"--optimizer.lr={0.5 / steps}", *further]


def alone(folder: Path, train: Sequence[str]) -> dict[int, Mapping[str, Any]]:
    """The undisturbed run's journal."""
    command = [sys.executable, "-m", "hvdtrain", *train, f"--run_dir={folder / 'alone'}"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    return dict(read_steps(folder / "alone" / "journal.jsonl"))


def measure(folder: Path, minutes: float, seed: int, further: Sequence[str]) -> dict[str, Any]:
    """Train both, and compare."""
    steps = int(minutes * 60 / STEP_S)
    train = task(steps, further)
    expected = alone(folder, train)
    soak = Soak(folder, train, seed)
    code = soak.train(minutes * 60)
    left = [" ".join(process.cmdline()) for process in soak.left()]
    found = read_steps(soak.run / "journal.jsonl")
    common = sorted(found.keys() & expected.keys())
    differences = [abs(found[s]["loss"] / expected[s]["loss"] - 1) for s in common]
    times = [found[s]["time"] for s in sorted(found)]
    pauses = [b - a for a, b in pairwise(times)]
    wrong = [w for w in (f"exit code {code}" if code else "", *map(str, verify_data(soak.run).wrong)) if w]
    wrong += [f"{len(expected) - len(common)} steps are missing"] if len(common) < len(expected) else []
    wrong += [f"left: {process}" for process in left]
    # A rank may be seen first when it is still a copy of the agent, and has its name.
    names = ("driver", "agent", "rank")
    old = [max((s for s in soak.seen.values() if s.name == name), key=lambda s: len(s.looks)) for name in names]
    return {
        "steps": steps,
        "wrong": wrong,
        "strikes": [{**s, "step": _step_at(found, s["time"])} for s in soak.strikes],
        "rounds": soak.rounds(),
        "worst": max(differences),
        "seconds": times[-1] - times[0],
        "pauses_s": sorted(pauses)[-max(1, len(soak.strikes)) :],
        "grown": {f"{s.name} ({len(s.looks)} looks)": s.grown() for s in old},
        "curves": {
            "struck": means([found[s]["loss"] for s in common]),
            "alone": means([expected[s]["loss"] for s in common]),
        },
    }


def _step_at(steps: Mapping[int, Mapping[str, Any]], when: float) -> int:
    """The step that was done last at a time."""
    return max((number for number, line in steps.items() if line["time"] <= when), default=0)


def means(losses: Sequence[float]) -> list[float]:
    """At most `POINTS` of them, each of neighbouring steps."""
    width = -(-len(losses) // POINTS)
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [round(sum(part) / len(part), 5) for part in parts]


def figures(found: Mapping[str, Any]) -> list[Figure]:
    rounds, strikes = found["rounds"], found["strikes"]
    grown = {name.partition(" ")[0]: values for name, values in found["grown"].items()}
    return [
        figure("soak/strikes", [len(strikes)], ""),
        figure("soak/rounds", [len(rounds)], ""),
        figure("soak/steps", [found["steps"]], ""),
        figure("soak/minutes", [found["seconds"] / 60], "min"),
        figure("soak/worst_difference_of_a_loss", [found["worst"]], "relative"),
        figure("soak/pause_s", found["pauses_s"], "s"),
        *(figure(f"soak/grown/{name}/mib", [values[0]], "MiB") for name, values in grown.items()),
        *(figure(f"soak/grown/{name}/threads", [values[1]], "") for name, values in grown.items()),
        *(figure(f"soak/grown/{name}/files", [values[2]], "") for name, values in grown.items()),
    ]


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Both curves, and a mark a strike."""
    plot, axes = pyplot("soak").subplots(figsize=(8, 3.2), layout="constrained")
    struck, undisturbed = found["curves"]["struck"], found["curves"]["alone"]
    width = found["steps"] / len(undisturbed)
    middles = [(index + 0.5) * width for index in range(len(undisturbed))]
    axes.plot(middles, undisturbed, color="#a0a0a0", linewidth=5, label="1 rank, undisturbed")
    axes.plot(
        middles, struck, color="#2f81f7", linewidth=1.5, label=f"{RANKS} ranks, struck {len(found['strikes'])} times"
    )
    colours = {"SIGKILL": "#e5534b", "SIGSTOP": "#c69026", "SIGTERM": "#57ab5a"}
    bottom = axes.get_ylim()[0]
    for name, colour in colours.items():
        steps = [strike["step"] for strike in found["strikes"] if strike["signal"] == name]
        axes.plot(steps, [bottom] * len(steps), "|", color=colour, markersize=12, label=f"{name} ({len(steps)})")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    plot.savefig(file, transparent=True, metadata={"Date": None})


def main() -> int:
    """Parse options, soak, say what came of it; 1 where something does not hold."""
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of striking (30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the curves there, as SVG")
    further = "an option of training, such as --option=--parallel.sync=diloco:8; repeatable"
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help=further)
    arguments = parser.parse_args()
    minutes = 1.0 if arguments.quick else arguments.minutes
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        found = measure(Path(folder), minutes, arguments.seed, arguments.option)
    results = figures(found)
    if arguments.json:
        write_text(arguments.json, json.dumps(content(results, soak=found), indent=1) + "\n")
    if arguments.picture:
        draw(found, arguments.picture)
    print_table(results)
    for text in found["wrong"]:
        print(f"WRONG: {text}", file=sys.stderr)
    return int(bool(found["wrong"] or found["worst"] > WORST))


if __name__ == "__main__":
    sys.exit(main())
