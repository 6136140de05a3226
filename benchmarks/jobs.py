"""Jobs of ours and of the peers that train the same, side by side: only one of them runs at a time.

All jobs are started and warmed up, then take turns while the others are stopped by SIGSTOP: what slows the whole
machine slows all of them. A job keeps a bias of its own of some percent for as long as it lives (two equal ones differ
that much), so all are started anew a few times.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import psutil
from common import HERE, T, in_turn

from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.observe.past_journal import read_steps

PATIENCE_S = 180
SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}


@dataclass(frozen=True)
class Setting:
    """What all contenders train.

    Attributes:
        model: of `models.MODELS`; for ours also SCRIPT:FUNCTION, a task of another script here.
        arguments: for its function.
        micro_batch: samples a forward pass.
        passes: forward passes a step on each rank.
        ranks: processes, each of 1 thread.
        optimizer: options of our `OptimizerConfig`.
        clip: largest norm of the gradient, 0 for any.
        ours: further options of ours.
        variables: further variables of the environment of ours.
    """

    model: str
    micro_batch: int
    passes: int = 1
    ranks: int = 2
    arguments: Mapping[str, object] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=lambda: asdict(OptimizerConfig()))
    clip: float = 1.0
    ours: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


BY_TORCH = "ours_by_torch"
"""The name of a contender: ours, whose ranks are started as torchrun does, so that torch's engines use Gloo."""


class Job:
    """The processes of one contender, ours, `BY_TORCH` or a peer (see `peer`), which run only in their turns."""

    def __init__(self, name: str, setting: Setting, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._journal = folder / "journal.jsonl"
        self._output = (folder / "output.txt").open("w+")
        if name == "ours":
            launch = ["horovodrun", "-np", str(setting.ranks)]
            commands = [([*launch, *ours(setting, folder)], environment(**setting.variables))]
        else:
            commands = _by_variables(name, setting, folder)
        self._processes = [
            subprocess.Popen(command, env=env, stdout=self._output, stderr=subprocess.STDOUT)
            for command, env in commands
        ]

    def steps(self) -> list[dict[str, float]]:
        """What is known of the steps so far: `time` at their end, and `step_s`."""
        return list(read_steps(self._journal).values()) if self._journal.exists() else []

    def until(self, reached: Callable[[list[dict[str, float]]], object], every_s: float = 0.2) -> None:
        """Run until the steps, looked at so often, are as asked for, then stop."""
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE_S
        while not reached(self.steps()):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self._output.seek(0)
                raise SystemExit(f"{self.name} does not train:\n{self._output.read()}")
            time.sleep(every_s)
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> list[dict[str, float]]:
        """Run for about `seconds`; the steps that lie within, but for the first: one or more."""
        start = time.time()

        def within(steps: list[dict[str, float]]) -> list[dict[str, float]]:
            return [s for s in steps if start < s["time"] - s["step_s"]][1:]

        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self.until(within)
        return within(self.steps())

    def end(self) -> None:
        """End all processes of the job."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._output.close()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                for member in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                    member.send_signal(number)


@contextmanager
def warmed_up(starts: Mapping[str, Callable[[Path], Job]], steps: int) -> Iterator[dict[str, Job]]:
    """Jobs that are started one after the other, each in a folder of its own, and stopped after so many steps."""
    jobs: dict[str, Job] = {}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends the jobs, too
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, start in starts.items():
            folder = scratch / name.replace(":", "_")
            folder.mkdir()
            jobs[name] = start(folder)
            stack.callback(jobs[name].end)
            jobs[name].until(lambda seen: len(seen) >= steps)
        yield jobs


def take_turns(jobs: Mapping[str, Job], turn: Callable[[Job], T], rounds: int) -> dict[str, list[T]]:
    """What `turn` gives of each job in each of `rounds`."""
    found: dict[str, list[T]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name in in_turn(list(jobs), number):
            found[name].append(turn(jobs[name]))
    return found


def race(
    names: Sequence[str],
    setting: Setting | Mapping[str, Setting],
    turn: Callable[[Job], T],
    *,
    rounds: int,
    warm_up: int,
    starts: int = 1,
) -> dict[str, list[T]]:
    """What `turn` gives of each contender in each of `rounds` of each of `starts`, after `warm_up` steps of each.

    Where settings are given by name, the contenders are all ours.
    """
    if isinstance(setting, Setting):
        jobs = {name: partial(Job, name, setting) for name in names}
    else:
        jobs = {name: partial(Job, "ours", setting[name]) for name in names}
    found: dict[str, list[T]] = {name: [] for name in names}
    for _ in range(starts):
        with warmed_up(jobs, warm_up) as running:
            for name, values in take_turns(running, turn, rounds).items():
                found[name] += values
    return found


def mpirun(label: str, argv: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> None:
    """Run a Python script on two ranks here."""
    command = ["mpirun", "-np", "2", "--bind-to", "none", sys.executable, *argv]
    env = environment(**variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise SystemExit(f"{label}: {done.stdout}{done.stderr}")


def environment(**more: str) -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **more,
    }


def ours(setting: Setting, folder: Path) -> list[str]:
    script, _, function = setting.model.rpartition(":")
    task = [] if setting.model == "default" else [f"--task={HERE / (script or 'models')}.py:{function}"]
    optimizer = {f"optimizer.{name}": value for name, value in setting.optimizer.items() if value is not None}
    options = [
        f"--run_dir={folder}",
        "--train.steps=1000000",
        "--checkpoint.every=0",
        "--train.eval_samples=4",
        f"--train.micro_batch={setting.micro_batch}",
        f"--train.global_batch={setting.micro_batch * setting.passes * setting.ranks}",
        f"--train.clip={setting.clip}",
        *(f"--{name}={value}" for name, value in {**setting.arguments, **optimizer, **setting.ours}.items()),
    ]
    return [sys.executable, "-m", "hvdtrain", *task, *options]


def peer(name: str, setting: Setting, journal: Path) -> list[str]:
    """The command of a peer's rank; `engine_loops:NAME` is one of that script, others are of peer_loops.py."""
    script, _, loop = name.rpartition(":")
    return [sys.executable, str(HERE / f"{script or 'peer_loops'}.py"), loop, json.dumps(asdict(setting)), str(journal)]


def torchrun(local_rank: int, local_size: int) -> dict[str, str]:
    """The variables by which ours takes itself for started by torchrun, beside those of a group."""
    return {
        "TORCHELASTIC_RUN_ID": "benchmark",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def _by_variables(name: str, setting: Setting, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    loop = ours(setting, folder) if name == BY_TORCH else peer(name, setting, folder / "journal.jsonl")
    if name in ("stock_horovod", "drop_in", "drop_in_views"):
        return [(["horovodrun", "-np", str(setting.ranks), *loop], environment())]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(setting.ranks)}
    own = [torchrun(rank, setting.ranks) if name == BY_TORCH else {} for rank in range(setting.ranks)]
    return [(loop, environment(**group, **own[rank], RANK=str(rank))) for rank in range(setting.ranks)]
