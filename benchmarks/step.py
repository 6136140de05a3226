"""How long is a step of the shipped default, beside two ranks without exchange, DDP over Gloo and stock Horovod?

2 ranks of 1 thread. All four jobs are started and warmed up, then take turns of seconds while the others are stopped by
SIGSTOP: what slows the whole machine slows all of them. A job keeps a bias of its own of some percent for as long as it
lives (two equal ones differ that much), so all are started anew a few times. A figure is the median over rounds of the
ratio of median step times of one round; only steps that lie within a turn count, not its first. Below 1 ours is faster.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import HERE, Figure, figure, main, ratios

from hvdtrain import Config
from hvdtrain.observe.journal import read_steps

RANKS = 2
WARM_UP, PATIENCE_S = 4, 180
MICRO_BATCH = {"default": Config().train.micro_batch, "llama15m": 4}
PASSES = {"default": Config().train.global_batch // Config().train.micro_batch // RANKS, "llama15m": 1}
CONTENDERS = ("ours", "no_exchange", "ddp", "stock_horovod")


class Job:
    """One contender's processes, which run only in their turns.

    Args:
        name: of `CONTENDERS`.
        model: of `models.MODELS`.
        folder: for what it writes.
    """

    def __init__(self, name: str, model: str, folder: Path) -> None:
        self.name = name
        self.journal = folder / "journal.jsonl"
        self._output = (folder / "output.txt").open("w+")
        commands = _ours(model, folder) if name == "ours" else _peer(name, model, self.journal)
        self._processes = [
            subprocess.Popen(command, env=env, stdout=self._output, stderr=subprocess.STDOUT)
            for command, env in commands
        ]

    def turn(self, seconds: float) -> float:
        """Run for about `seconds`; the median time of the steps that lie within."""
        start = time.time()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        end = time.time()
        self.stop()
        steps = [s for s in read_steps(self.journal).values() if start < s["time"] - s["step_s"] and s["time"] < end]
        return statistics.median(s["step_s"] for s in steps[1:])

    def warm_up(self) -> None:
        """Wait for the first steps, then stop."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.journal.exists() and len(read_steps(self.journal)) >= WARM_UP):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self._output.seek(0)
                raise SystemExit(f"{self.name} does not train:\n{self._output.read()}")
            time.sleep(0.2)
        self.stop()

    def stop(self) -> None:
        """Take no more time until the next turn."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End all processes of the job."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._output.close()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            for member in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                member.send_signal(number)


def _environment(**more: str) -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **more,
    }


def _ours(model: str, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    task = [] if model == "default" else [f"--task={HERE / 'models.py'}:{model}"]
    options = [
        f"--run_dir={folder}",
        "--train.steps=1000000",
        "--checkpoint.every=0",
        "--train.eval_samples=4",
        f"--train.micro_batch={MICRO_BATCH[model]}",
        f"--train.global_batch={MICRO_BATCH[model] * PASSES[model] * RANKS}",
    ]
    command = ["horovodrun", "-np", str(RANKS), sys.executable, "-m", "hvdtrain", *task, *options]
    return [(command, _environment())]


def _peer(name: str, model: str, journal: Path) -> list[tuple[list[str], dict[str, str]]]:
    script = str(HERE / "peer_loops.py")
    loop = [sys.executable, script, name, model, str(PASSES[model]), str(MICRO_BATCH[model]), str(journal)]
    if name == "stock_horovod":
        return [(["horovodrun", "-np", str(RANKS), *loop], _environment())]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    return [(loop, _environment(**group, RANK=str(rank))) for rank in range(RANKS)]


def race(model: str, rounds: int, turn_s: float) -> dict[str, list[float]]:
    """Median step of each contender in each round, in seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as scratch:
        jobs: list[Job] = []
        try:
            for name in CONTENDERS:
                folder = Path(scratch) / name
                folder.mkdir()
                jobs.append(Job(name, model, folder))
                jobs[-1].warm_up()
            for number in range(rounds):
                for job in jobs[number % 4 :] + jobs[: number % 4]:
                    seconds[job.name].append(job.turn(turn_s))
        finally:
            for job in jobs:
                job.end()
    return seconds


def measure(quick: bool) -> list[Figure]:
    """All contenders, round by round."""
    figures = []
    for model in ("default",) if quick else ("default", "llama15m"):
        seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for _ in range(1 if quick else 5):
            for name, found in race(model, rounds=2 if quick else 3, turn_s=4.0).items():
                seconds[name] += found
        suffix = "" if model == "default" else f"/{model}"
        for name in CONTENDERS[1:]:
            figures.append(figure(f"step/{name}{suffix}", ratios(seconds["ours"], seconds[name]), "ratio"))
        for name in CONTENDERS:
            figures.append(figure(f"step/{name}_ms{suffix}", [1e3 * s for s in seconds[name]], "ms"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
