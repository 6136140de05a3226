"""How long until something happens: the help, and the first step beside a bare script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import HERE, Figure, figure, main, ratios

from hvdtrain.observe.past_journal import read_steps

PROBE = "import sys, hvdtrain.__main__ as m; m.main(['--help']); assert 'torch' not in sys.modules"
BARE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from models import default
from hvdtrain.config.schema import Config
from hvdtrain.training.start.optimizers import make_optimizer
import torch
task = default()
task.model.train()
optimizer = make_optimizer(task.model, Config().optimizer)
train = Config().train
for i in range(0, train.global_batch, train.micro_batch):
    loss, weight = task.loss(task.model, torch.stack([task.train_data[i + j] for j in range(train.micro_batch)]))
    (loss / weight).backward()
optimizer.step()
print(time.time())
"""


def _run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def help_s() -> float:
    """Seconds that ``hvdtrain --help`` takes."""
    start = time.perf_counter()
    _run([str(Path(sys.executable).with_name("hvdtrain")), "--help"])
    return time.perf_counter() - start


def first_step_s() -> float:
    """Seconds from the start of ``python -m hvdtrain`` to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        options = ["--train.steps=1", "--checkpoint.every=0", "--train.eval_samples=4", f"--run_dir={folder}/run"]
        _run([sys.executable, "-m", "hvdtrain", *options])
        return float(read_steps(Path(folder) / "run" / "journal.jsonl")[1]["time"] - start)


def bare_s() -> float:
    """The same for a script that does only that step."""
    start = time.time()
    return float(json.loads(_run([sys.executable, "-c", BARE, str(HERE)]))) - start


def measure(quick: bool) -> list[Figure]:
    _run([sys.executable, "-c", PROBE])
    first_step_s()  # tokenises the text and fills the file cache
    repeats = 3 if quick else 10
    helps = [help_s() for _ in range(repeats)]
    pairs = [(first_step_s(), bare_s()) for _ in range(repeats)]
    ours, bare = [a for a, _ in pairs], [b for _, b in pairs]
    return [
        figure("startup/help_s", helps, "s"),
        figure("startup/first_step_s", ours, "s"),
        figure("startup/first_step", ratios(ours, bare), "ratio"),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
