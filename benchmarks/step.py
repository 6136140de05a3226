"""How long is a step of the shipped default, beside two ranks without exchange, DDP over Gloo and stock Horovod?

2 ranks of 1 thread. Each round starts one job of each contender, in turn; a figure is the median over rounds of
the ratio of median step times. Below 1 ours is faster.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import HERE, Figure, figure, main, ratios

from hvdtrain import Config
from hvdtrain.observe.journal import read_steps

RANKS = 2
WARM_UP = 4
MICRO_BATCH = {"default": Config().train.micro_batch, "llama15m": 4}
PASSES = {"default": Config().train.global_batch // Config().train.micro_batch // RANKS, "llama15m": 1}
PEERS = ("no_exchange", "ddp", "stock_horovod")


def _environment() -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"{process.args} failed:\n{output}")


def _start(command: list[str], extra: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env={**_environment(), **(extra or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ours(model: str, steps: int, folder: Path) -> float:
    """Median step of ``horovodrun -np 2 python -m hvdtrain``, in seconds."""
    run = folder / "run"
    task = [] if model == "default" else [f"--task={HERE / 'models.py'}:{model}"]
    options = [
        f"--run_dir={run}",
        f"--train.steps={steps}",
        "--checkpoint.every=0",
        "--train.eval_samples=4",
        f"--train.micro_batch={MICRO_BATCH[model]}",
        f"--train.global_batch={MICRO_BATCH[model] * PASSES[model] * RANKS}",
    ]
    _wait([_start(["horovodrun", "-np", str(RANKS), sys.executable, "-m", "hvdtrain", *task, *options])])
    seconds = [line["step_s"] for line in read_steps(run / "journal.jsonl").values()]
    return statistics.median(seconds[WARM_UP:])


def peer(name: str, model: str, steps: int, folder: Path) -> float:
    """Median step of a hand-written loop, in seconds."""
    file = folder / "seconds.json"
    loop = [
        sys.executable,
        str(HERE / "peer_loops.py"),
        name,
        model,
        str(steps),
        str(PASSES[model]),
        str(MICRO_BATCH[model]),
        str(file),
    ]
    if name == "stock_horovod":
        _wait([_start(["horovodrun", "-np", str(RANKS), *loop])])
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        _wait([_start(loop, {**group, "RANK": str(rank)}) for rank in range(RANKS)])
    return statistics.median(json.loads(file.read_text())[WARM_UP:])


def measure(quick: bool) -> list[Figure]:
    """All contenders, round by round."""
    figures = []
    for model in ("default",) if quick else ("default", "llama15m"):
        steps, rounds = (12, 1) if quick else (24, 5)
        seconds: dict[str, list[float]] = {name: [] for name in ("ours", *PEERS)}
        for number in range(rounds):
            order = ["ours", *PEERS]
            for name in order[number % 4 :] + order[: number % 4]:
                with tempfile.TemporaryDirectory() as folder:
                    where = Path(folder)
                    timed = ours(model, steps, where) if name == "ours" else peer(name, model, steps, where)
                seconds[name].append(timed)
        suffix = "" if model == "default" else f"/{model}"
        figures += [figure(f"step/{name}{suffix}", ratios(seconds["ours"], seconds[name]), "ratio") for name in PEERS]
        figures += [figure(f"step/{name}_ms{suffix}", [1e3 * s for s in seconds[name]], "ms") for name in seconds]
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
