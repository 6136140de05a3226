"""Horovod's own Timeline in real jobs: which steps it records, what ends it, and which start each file belongs to."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.install import record
from tests.support.gallery import Gallery
from tests.support.journals import read_journal
from tests.support.launch import ROOT, program, run, train

TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=8", "--train.global_batch=8", "--train.micro_batch=2"]
TOY += ["--checkpoint.every=0", "--run_dir=run"]
GRADIENTS = "allreduce.gradients/0"
OURS = "broadcast.timeline/"
quiet = pytest.mark.skipif(
    "CI" not in os.environ and (found := record.installed()) is not None and not found.quiet,
    reason="this Horovod's writer spins: it was not built by this version's hvdtrain build-horovod",
)


def of_horovod(folder: Path) -> list[Path]:
    return sorted((folder / "run/timeline").glob("horovod-*"))


def warnings(folder: Path) -> list[str]:
    """All but the one of horovodrun --gloo's open port."""
    texts = [line["text"] for line in read_journal(folder / "run/journal.jsonl") if line.get("event") == "warning"]
    return [text for text in texts if not text.startswith("horovodrun's rendezvous")]


def read(path: Path, *, whole: bool = True) -> list[tuple[str, str]]:
    """(tensor, operation) of each pair of B and E, which are nested as the format wants.

    Args:
        path: the file.
        whole: whether each B has its E; else those still open at the end are left out.
    """
    names: dict[int, str] = {}
    open_: dict[int, list[str]] = {}
    pairs = []
    last_us = 0.0
    events: list[dict[str, Any]] = json.loads(path.read_text())
    for event in events:
        pid = event["pid"]
        if event["ph"] == "M":
            names[pid] = event["args"].get("name", names.get(pid))
            continue
        assert event["ts"] >= last_us
        last_us = event["ts"]
        if event["ph"] == "B":
            open_.setdefault(pid, []).append(event["name"])
        elif event["ph"] == "E":
            if open_.get(pid):
                pairs.append((names[pid], open_[pid].pop()))
            else:
                assert names[pid].startswith(OURS), f"E without B: {names[pid]}, {event}"
    left = {names[pid]: stack for pid, stack in open_.items() if stack and not names[pid].startswith(OURS)}
    assert not (whole and left)
    return pairs


def test_the_steps_of_the_window_and_no_others_are_recorded(gallery: Gallery) -> None:
    run = gallery["two"].run
    (file,) = (run / "timeline").glob("horovod-*")
    assert file.name == "horovod-steps-10-30.json"
    count = Counter(read(file))
    assert count[GRADIENTS, "ALLREDUCE"] == count[GRADIENTS, "NEGOTIATE_ALLREDUCE"] == 21
    assert gallery["two"].events("warning") == []


def test_a_rank_that_fails_in_a_window_leaves_a_readable_file(gallery: Gallery) -> None:
    (file,) = (gallery["raised"].run / "timeline").glob("horovod-*")
    assert Counter(read(file, whole=False))[GRADIENTS, "ALLREDUCE"] >= 2


@pytest.mark.parametrize("how", ["variable", "horovodrun", "horovodrun --gloo"])
@pytest.mark.slow
def test_the_users_own_file_is_whole_and_left_alone(how: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    options = [*TOY, "--observe.timeline=3:4"]
    if how == "variable":
        done = train(*options, size=2, cwd=tmp_path, environment={"HOROVOD_TIMELINE": str(mine)})
    else:
        launcher = [program("horovodrun"), *how.split()[1:], "-np", "2", "--timeline-filename", str(mine)]
        call = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
        done = run(["-c", call, *launcher, sys.executable, "-m", "hvdtrain", *options], cwd=tmp_path)
    # Horovod's shutdown does not wait for what its writer has still to write: the last collective may lack its end.
    assert Counter(read(mine, whole=False))[GRADIENTS, "ALLREDUCE"] == 8
    assert of_horovod(tmp_path) == []
    assert f"left as the user set it: HOROVOD_TIMELINE={mine} is set" in done.stdout


INITIALISED = """
import horovod.torch as hvd
hvd.init()
from hvdtrain.__main__ import main
raise SystemExit(main({options!r}))
"""


@pytest.mark.slow
def test_a_program_that_started_horovod_without_timeline_is_warned(tmp_path: Path) -> None:
    done = run(["-c", INITIALISED.format(options=[*TOY, "--observe.timeline=3:4"])], size=2, cwd=tmp_path)
    assert "finished at step 8 of 8" in done.stdout
    assert len([text for text in warnings(tmp_path) if "initialised without Timeline" in text]) == 1
    assert of_horovod(tmp_path) == []


WATCHING = """
import threading
import time
from pathlib import Path
import torch
from hvdtrain import Task
from hvdtrain.runtime.threads import read_busy_ns, thread_ids

LONG_NS = 50_000_000  # of running

def read_sleeps(thread):
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])

def build():
    calls, before = [], {}
    def loss(model, batch):
        calls.append(1)
        if len(calls) in (40, 800):  # two a step
            others = thread_ids() - {threading.get_native_id()}
            uses = {thread: (read_sleeps(thread), read_busy_ns(thread)) for thread in others}
            for thread in before.keys() & others:
                (slept, busy_ns), (slept_before, busy_before_ns) = uses[thread], before[thread]
                assert slept > slept_before or busy_ns < busy_before_ns + LONG_NS, (before[thread], uses[thread])
            before.update(uses)
        return model(batch[0]).sum(), 1
    return Task(torch.nn.Linear(1, 1), loss, torch.utils.data.TensorDataset(torch.ones(8, 1)))
"""


@quiet
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
@pytest.mark.slow
def test_outside_of_the_window_no_thread_spins(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "watching.py").write_text(WATCHING)
    options = ["--task=watching.py:build", *TOY[1:], "--train.steps=400", "--observe.timeline=5:8"]
    train(*options, size=2, launcher=launcher, cwd=tmp_path)
    (file,) = of_horovod(tmp_path)
    assert Counter(read(file))[GRADIENTS, "ALLREDUCE"] == 4
    assert warnings(tmp_path) == []
