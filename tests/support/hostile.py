"""Wrong and malicious files for commands."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import numpy as np

from tests.support.launch import ROOT

TASKS = """
import sys
import torch
from hvdtrain import Task


def build(hidden: int = 4, loss=None, data=None):
    model = torch.nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.ones(40, 3)) if data is None else data
    return Task(model, loss or (lambda model, batch: (model(batch[0]).sum(), len(batch[0]))), data)


class Samples(torch.utils.data.Dataset):
    def __init__(self, length, sample):
        self.length, self.sample = length, sample

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.sample()


def fails():
    raise OSError("no such picture")


def nothing(): pass
def raising(): raise RuntimeError("no luck")
def exiting(): sys.exit(0)
def no_data(): return build(data=torch.utils.data.TensorDataset(torch.zeros(0, 3)))
def no_pairs(): return build(loss=lambda model, batch: model(batch[0]).sum())
def no_weight(): return build(loss=lambda model, batch: (model(batch[0]).sum(), "x"))
def not_finite(): return build(loss=lambda model, batch: (model(batch[0]).sum() * float("nan"), 1))
def negative(): return build(data=Samples(-3, fails))
def countless(): return build(data=Samples("many", fails))
def a_number(): return build(data=5)
def unreadable(): return build(data=Samples(40, fails))
def ending(): return build(data=Samples(40, lambda: sys.exit(3)))
def empty_samples(): return build(data=Samples(40, lambda: None))
"""

_TEXTS = {
    "tasks.py": TASKS,
    "syntax.py": "def build(:",
    "importing.py": "import nosuchmodule",
    "dividing.py": "1 / 0",
    "exiting.py": "import sys; sys.exit(0)",
    "many.yaml": "train: {steps: many}",
    "date.yaml": "a: 2026-13-45",
    "two.yaml": "a: 1\n---\nb: 2",
    "number.yaml": "task: 5",
    "empty.txt": "",
    "deep.json": "[" * 100_000,
    "odd.json": '[{"ph":"B","name":"x","ts":1e400,"pid":1},{"ph":"E","ts":NaN,"pid":1e5},{"ph":[]}]',
}


def make(folder: Path, run: Path) -> None:
    """Write all of them into an empty folder; copies of a run that has finished are damaged."""
    for name, text in _TEXTS.items():
        (folder / name).write_text(text)
    (folder / "binary").write_bytes(bytes(range(256)) * 9)
    shutil.copy(folder / "binary", folder / "binary.npy")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.npy")
    for name, content in {
        "none": np.zeros(0, np.int64),
        "negative": -np.ones(999, np.int64),
        "large": np.full(999, 1 << 40),
    }.items():
        np.save(folder / f"{name}.npy", content)
    good = gzip.decompress((ROOT / "tests/timeline/traces/training.json.gz").read_bytes())
    (folder / "good.json").write_bytes(good)
    _runs(folder, run)


def _runs(folder: Path, run: Path) -> None:
    for name in ("run", "deep", "bytes", "fifos"):
        shutil.copytree(run, folder / name)
    (folder / "deep/config.yaml").write_text("[" * 3000)
    for file in [*(folder / "bytes").glob("*/*"), folder / "bytes/journal.jsonl"]:
        if file.is_file():
            shutil.copy(folder / "binary", file)
    for file in [*(folder / "fifos/timeline").iterdir(), folder / "fifos/config.yaml", folder / "fifos/journal.jsonl"]:
        file.unlink()
        os.mkfifo(file)
    for name in ("cut", "no-manifest", "no-tensors"):
        shutil.copytree(next((folder / "run/checkpoints").glob("step-*")), folder / name)
    os.truncate(folder / "cut/model.safetensors", 100)
    (folder / "no-manifest/manifest.json").unlink()
    (folder / "no-tensors/model.safetensors").unlink()
    os.mkfifo(folder / "run/timeline/.window-request.json")
    (folder / "start").mkdir()
    (folder / "start/journal.jsonl").touch()
