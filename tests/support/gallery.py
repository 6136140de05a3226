"""The gallery: jobs that really run, each made once a test run when a test first asks for it, and looked at by many.

To add to it, look first whether a run that is here shows what you want; else write a function from an empty folder to
a `Recorded`, and decorate it with `_recording`. ``tests/conftest.py`` has the fixture; `make test` counts jobs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from hvdtrain.observe.past_journal import read_steps
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.task.base import Task
from tests.support.audited import audited
from tests.support.divided_models import DIVIDED, FOUR, STAGES, TWO, of_variant
from tests.support.journals import read_journal
from tests.support.launch import ROOT, TIMEOUT_S, run, stop_by_sigterm, train, training
from tests.support.recorded import FAULT
from tests.support.scenario import Scenario
from tests.support.stack import STACK, STATISTICS, VARIANTS
from tests.support.thread_job import train_on_threads

STEPS = 60
TOY = (
    f"--task={ROOT}/tests/support/recorded.py:recorded",
    "--train.global_batch=9",
    "--train.micro_batch=2",
    f"--train.steps={STEPS}",
    "--train.check_every=10",
    "--checkpoint.every=20",
    "--train.ema=0.9",
    "--run_dir=run",
)
_SMALL = ("--train.micro_batch=2", "--train.eval_samples=8")
IMAGE = ("--task=image", "--train.global_batch=9", "--train.steps=12", *_SMALL)
LANGUAGE = ("--model.preset=tiny", "--train.global_batch=8", "--train.steps=8", *_SMALL)
_ROOT = {"PYTHONPATH": str(ROOT)}
SECRET = "what-nobody-shall-read"
"""In the environment of the run `raised`."""
KILLED_AT = 27
"""Step in which rank 1 of the run `killed` dies: in the second of its two micro-batches."""


@dataclass(frozen=True)
class Recorded:
    """What is left of a job that was started in `folder`; `notes` have what else was seen of it."""

    folder: Path
    code: int
    out: str
    err: str
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @cached_property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.run / "journal.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the journal that are events of this name."""
        return [line for line in self.journal if line.get("event") == name]

    def losses(self) -> list[float]:
        """By step, from the first to the last: none is missing."""
        steps = read_steps(self.run / "journal.jsonl")
        assert sorted(steps) == list(range(1, len(steps) + 1))
        return [steps[step]["loss"] for step in sorted(steps)]

    def state(self) -> StateDict:
        """Of the newest checkpoint, which is whole."""

        def refuse(text: str) -> None:
            raise AssertionError(text)

        found = CheckpointStore(self.run / "checkpoints", refuse).load_newest()
        assert found is not None
        return found[1]

    def card(self) -> dict[str, Any]:
        return json.loads((self.run / "failure.json").read_text())  # type: ignore[no-any-return]


def record_on_threads(
    folder: Path, *options: str, size: int = 1, build: Callable[[int], Task] | None = None
) -> Recorded:
    """Train in this process, as `train_on_threads` does, and return what is left."""
    train_on_threads(*options, f"--run_dir={folder / 'run'}", size=size, build=build)
    return Recorded(folder, 0, "", "")


_RECORDINGS: dict[str, Callable[[Path], Recorded]] = {}


def _recording(make: Callable[[Path], Recorded]) -> Callable[[Path], Recorded]:
    _RECORDINGS[make.__name__] = make
    return make


class Gallery:
    """Recorded runs by name, in a folder that the processes of a test run share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Recorded:
        """The run, made if no process has made it yet. One that could not be made is an error for each who asks."""
        folder = self._root / name
        done = folder.with_suffix(".json")
        self._root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                assert not folder.exists(), f"the run {name!r} was not made to its end: its test ran too long"
                folder.mkdir()
                done.write_text(json.dumps(_made(name, folder)))
        facts = json.loads(done.read_text())
        assert "error" not in facts, facts["error"]
        return Recorded(folder, **facts)


def _made(name: str, folder: Path) -> Mapping[str, Any]:
    """The facts of a new run, or of why there is none."""
    try:
        facts = asdict(_RECORDINGS[name](folder))
    except Exception:
        return {"error": f"the run {name!r} could not be made:\n{traceback.format_exc()}"}
    del facts["folder"]
    return facts


def _trained(folder: Path, *options: str, **how: Any) -> Recorded:
    how = {"size": 2, "check": True, **how}
    environment = {**_ROOT, **how.pop("environment", {})}
    done = train(*options, cwd=folder, environment=environment, **how)
    return Recorded(folder, done.returncode, done.stdout, done.stderr)


def _fault(how: str, rank: int, at: int) -> dict[str, Any]:
    return {"environment": {FAULT: f"{how}:{rank}:{at}", "TOKEN_OF_A_TRACKER": SECRET}, "check": False}


@_recording
def one(folder: Path) -> Recorded:
    """One process, no launcher; what imports Horovod fails."""
    (folder / "horovod.py").write_text("raise ImportError('there is no Horovod here')")
    return _trained(folder, *TOY, size=1, environment={"PYTHONPATH": f"{folder}:{ROOT}"})


@_recording
def two(folder: Path) -> Recorded:
    """Two ranks by mpirun, with a window of Horovod's Timeline, a profile, and a note of Python's audit events."""
    return _trained(
        folder, *TOY, "--observe.timeline=10:30", "--observe.profile=26:28", environment=audited(folder / "audit")
    )


@_recording
def three(folder: Path) -> Recorded:
    """Three ranks by mpirun."""
    return _trained(folder, *TOY, size=3)


@_recording
def gloo(folder: Path) -> Recorded:
    """Two ranks by ``horovodrun --gloo``."""
    return _trained(folder, *TOY, launcher="horovodrun --gloo")


@_recording
def torchrun(folder: Path) -> Recorded:
    """Four ranks by torchrun with the engine ddp; what imports Horovod fails."""
    (folder / "horovod.py").write_text("raise ImportError('there is no Horovod here')")
    environment = {"PYTHONPATH": f"{folder}:{ROOT}"}
    return _trained(folder, *TOY, "--parallel.engine=ddp", size=4, launcher="torchrun", environment=environment)


_DDP = ("--parallel.engine=ddp", "--parallel.balance=speed")


@_recording
def engines(folder: Path) -> Recorded:
    """Two ranks with the engine ddp, stopped at step 25; then fsdp to step 45, and Horovod's; each resumes."""
    _trained(folder, *TOY, "--train.stop_at=25", *_DDP)
    _trained(folder, *TOY, "--train.stop_at=45", "--parallel.engine=fsdp")
    last = _trained(folder, *TOY)
    return Recorded(folder, last.code, last.out, last.err)


@_recording
def resumed(folder: Path) -> Recorded:
    """Two ranks by ``hvdtrain launch``, stopped at step 25; then by mpirun, to the end."""
    half = (*TOY, "--train.stop_at=25")
    first = run(["-m", "hvdtrain", "launch", "-np", "2", "--", *half], cwd=folder, environment=_ROOT)
    second = _trained(folder, *TOY)
    return Recorded(folder, second.code, second.out, second.err, {"out": first.stdout, "err": first.stderr})


@_recording
def killed(folder: Path) -> Recorded:
    """Two ranks, of which rank 1 is killed in step 27; then the command on the failure card, typed in a shell."""
    first = _trained(folder, *TOY, **_fault("kill", 1, 2 * KILLED_AT))
    card, text = first.card(), (first.run / "failure.txt").read_text()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    done = subprocess.run(
        shlex.split(card["resume"]),
        cwd=folder,
        env={**environment, **_ROOT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    notes = {"code": first.code, "said": first.out + first.err, "card": card, "text": text}
    return Recorded(folder, done.returncode, done.stdout, done.stderr, notes)


@_recording
def raised(folder: Path) -> Recorded:
    """Two ranks, of which rank 1 raises an error in step 4."""
    return _trained(folder, *TOY, "--observe.timeline=all", "--checkpoint.every=2", **_fault("raise", 1, 8))


@_recording
def survived(folder: Path) -> Recorded:
    """An elastic job of two ranks: rank 0 is killed in step 12, rank 1 goes on, another one comes."""
    job = Scenario(folder, "-np", "2", "--elastic", "1:2", fault="SIGKILL", rank=0)
    with job:
        job.until("round 2: 1 rank(s) on 1 host(s)")
        job.until("round 3: 2 rank(s) on 1 host(s)")
        out = job.finish()
    return Recorded(folder, 0, out, "\n".join(job.said), {"sizes": job.sizes()})


@_recording
def signalled(folder: Path) -> Recorded:
    """Two ranks with loader processes: a window of traces is asked for, SIGUSR1, then SIGTERM to rank 0."""
    notes: dict[str, Any] = {}

    def hvdtrain(*words: str) -> list[Any]:
        done = run(["-m", "hvdtrain", *words, "run"], cwd=folder, environment=_ROOT, check=False)
        return [done.returncode, done.stdout, done.stderr]

    endless = ("--train.steps=1000000", "--checkpoint.every=0", "--loader.workers=1", "--observe.line_every_s=0")
    with training(*TOY, *endless, "--observe.timeline=2:4", size=2, cwd=folder, after=5, environment=_ROOT) as process:
        notes |= {command: hvdtrain("timeline", command) for command in ("start", "stop")}
        notes["verified"] = hvdtrain("verify", "data")[0]
        notes["horovod"] = {file.name: file.read_text() for file in (folder / "run/timeline").glob("horovod-steps-*")}
        notes["spans"] = {file.name: file.read_text() for file in (folder / "run/timeline").glob("spans-rank-*.json")}
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        for _ in process.stdout:  # a line a step
            if list((folder / "run/checkpoints").glob("step-*")):
                break
        out = stop_by_sigterm(process)
    return Recorded(folder, process.returncode, out, "", notes)


@_recording
def late(folder: Path) -> Recorded:
    """Two ranks whose compute is sleep; rank 1 sleeps twice as long in its forward pass as rank 0 in all."""
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=150", "--late_rank=1", "--late_ms=300", "--late_in=forward")
    how = ("--train.steps=25", "--train.global_batch=2", "--train.micro_batch=1", "--checkpoint.every=0")
    return _trained(folder, task, *slow, *how, "--run_dir=run")


@_recording
def image(folder: Path) -> Recorded:
    """The image task on two ranks."""
    return _trained(folder, *IMAGE, "--run_dir=run")


@_recording
def language(folder: Path) -> Recorded:
    """The language model on two ranks."""
    return _trained(folder, *LANGUAGE, "--run_dir=run")


_INT8, _STOP = "--parallel.compression=int8", "--train.stop_at=3"
_HALVES = [("halves", (_STOP,)), ("halves", ()), ("int8_halves", (_INT8, _STOP)), ("int8_halves", (_INT8,))]
_HALVES += [("remade_halves", (*VARIANTS["remade"], _STOP)), ("remade_halves", VARIANTS["remade"])]
_BITS = ("--train.reproducible=bits", "--train.global_batch=11", "--method=momentum")
_ALONE: dict[str, tuple[str, ...]] = {
    **VARIANTS,
    "statistics": STATISTICS,
    **{name: (f"--parallel.compression={name}",) for name in ("fp16", "bf16", "int8")},
    "weights": ("--precision=bf16-weights",),
    "int8_weights": (_INT8, "--precision=bf16-weights"),
    "offload": ("--memory.offload=optimizer",),
    "int8/offload": (_INT8, "--memory.offload=optimizer"),
    "recomputed": ("--memory.checkpointing=selective",),
    "bits": _BITS,
    "bits_again": (*_BITS, "--again=true"),
}
"""Trainings by FSDP in one group, by name."""
_IN_GROUPS: dict[str, tuple[str, ...]] = {
    **VARIANTS,
    **{name: (f"--parallel.compression={name}",) for name in ("fp16", "bf16", "topk:0.5")},
    "int8": (_INT8, "--checkpoint.every=3"),  # a save makes residuals equal on all ranks
    "recomputed": ("--memory.checkpointing=full",),
}
"""Trainings by FSDP in groups, by name."""
_FSDP = "--parallel.engine=fsdp"
DIVIDING = (
    (*TOY, *_DDP),
    *TWO.values(),
    *FOUR.values(),
    *((_FSDP, *options) for options in _ALONE.values()),
    *((_FSDP, "--parallel.dp_shard=2", *options) for options in _IN_GROUPS.values()),
)
"""Options of trainings by other engines, and by ranks that divide a model."""


@_recording
def fsdp(folder: Path) -> Recorded:
    """FSDP on two ranks by mpirun: each of `_ALONE`; then on four by torchrun; and one run through all stages.

    ``two/NAME`` and ``four/NAME`` have the runs; ``two/halves``, ``two/int8_halves`` and ``two/remade_halves`` are
    stopped and resumed. Another engine resumes ``two/crossed``, of int8. `by_torchrun` has those on four that are not
    here.
    ``resized`` has the run with stages of two, one, four and two ranks; only those on two and four are by FSDP.
    """
    resized = f"--run_dir={folder / 'resized' / 'run'}"
    first = [*_ALONE.items(), *_HALVES, ("crossed", (_INT8, _STOP)), ("", (resized, "--train.stop_at=2"))]
    out = train_by_fsdp(folder / "two", first, 2, "mpirun")
    train_on_threads(*STACK, f"--run_dir={folder / 'two' / 'crossed' / 'run'}", size=1)
    train_on_threads(*STACK, resized, "--train.stop_at=3", size=1)
    some = [(name, _ALONE[name]) for name in ("even", "uneven", "statistics", "int8", "bits")]
    last = [*some, ("", (resized, "--train.stop_at=5"))]
    out += train_by_fsdp(folder / "four", last, 4, "torchrun")
    train_on_threads(*STACK, resized, "--parallel.shard=optimizer", size=2)
    return Recorded(folder, 0, out, "")


@_recording
def hybrid(folder: Path) -> Recorded:
    """FSDP in two groups of two ranks by mpirun: each of `_IN_GROUPS`, in ``four/NAME``.

    Also ``four/halves`` and ``four/int8_halves``, which are stopped and resumed. One rank resumes ``four/crossed``, of
    int8, and groups resume ``four/joined``, of two ranks with int8. In ``four/wandering``, rank 3 changes its rows.
    """
    (folder / "four").mkdir()
    joined = f"--run_dir={folder / 'four' / 'joined' / 'run'}"
    train_on_threads(*STACK, joined, _INT8, _STOP, size=2)
    listed = [*_IN_GROUPS.items(), *_HALVES, ("crossed", (_INT8, _STOP)), ("joined", ())]
    listed += [("wandering", ("--wanders=true", "--train.check_every=2"))]
    out = train_by_fsdp(folder / "four", listed, 4, "mpirun", "--parallel.dp_shard=2")
    train_on_threads(*STACK, f"--run_dir={folder / 'four' / 'crossed' / 'run'}", size=1)
    return Recorded(folder, 0, out, "")


@_recording
def by_torchrun(folder: Path) -> Recorded:
    """FSDP on four ranks by torchrun: ``four/NAME`` of `_ALONE`, and ``groups/NAME`` of `_IN_GROUPS`; some of each."""
    alone = [(name, _ALONE[name]) for name in ("even", "uneven", "scaled", "bf16", "int8_weights", "offload")]
    groups = [(name, _IN_GROUPS[name]) for name in ("even", "uneven", "back", "int8", "topk:0.5", "recomputed")]
    out = train_by_fsdp(folder / "four", alone, 4, "torchrun")
    out += train_by_fsdp(folder / "groups", groups, 4, "torchrun", "--parallel.dp_shard=2")
    return Recorded(folder, 0, out, "")


def _divided(folder: Path, ranks: int, trainings: dict[str, tuple[str, ...]]) -> Recorded:
    """Each in ``NAME``, by mpirun; those by AdamW on two ranks again in ``halves/NAME``, stopped and resumed."""
    again = [(name, options) for name, options in trainings.items() if ranks == 2 and "adamw" in name]
    halves = [(f"halves/{name}", (*options, *stop)) for name, options in again for stop in ((_STOP,), ())]
    out = train_in_one_job(folder, DIVIDED, [*trainings.items(), *halves], ranks)
    return Recorded(folder, 0, out, "")


def in_stages(trainings: dict[str, tuple[str, ...]], *, divided: bool) -> dict[str, tuple[str, ...]]:
    """Return those in which ranks have different layers, or the others."""
    return {name: options for name, options in trainings.items() if ("pp" in name.partition("/")[0]) == divided}


# Ranks with parts of the layers, and those that divide matrices, experts or sequences.
for _name, _size, _trainings in (("two", 2, TWO), ("four", 4, FOUR)):
    for _parts, _layers in (("layers", True), ("matrices", False)):
        _of = in_stages(_trainings, divided=_layers)
        _RECORDINGS[f"{_name}_{_parts}"] = partial(_divided, ranks=_size, trainings=_of)


@_recording
def resized(folder: Path) -> Recorded:
    """Two ranks, then four, then one, each of `STAGES` in ``NAME``: 2 steps each, with other dimensions."""
    longer = (*DIVIDED, *of_variant("longer"))
    out = train_in_one_job(folder, longer, [(n, (*o[0], "--train.stop_at=2")) for n, o in STAGES.items()], 2)
    out += train_in_one_job(folder, longer, [(n, (*o[1], "--train.stop_at=4")) for n, o in STAGES.items()], 4)
    for name, options in STAGES.items():
        train_on_threads(*longer, f"--run_dir={folder / name / 'run'}", *options[2], size=1)
    return Recorded(folder, 0, out, "")


def train_by_fsdp(
    folder: Path, variants: list[tuple[str, tuple[str, ...]]], size: int, launcher: str, *options: str
) -> str:
    """Train each in one job, in ``folder/NAME/run``; return the output. Each rank writes what it holds."""
    return train_in_one_job(folder, (*STACK, _FSDP, *options), variants, size, launcher)


def train_in_one_job(
    folder: Path,
    common: tuple[str, ...],
    variants: list[tuple[str, tuple[str, ...]]],
    size: int,
    launcher: str = "mpirun",
) -> str:
    """Train each in one job, in ``folder/NAME/run``; return the output. Each rank writes what it holds."""
    folder.mkdir(exist_ok=True)
    listed = folder / "trainings.json"
    listed.write_text(json.dumps([[*common, f"--run_dir={folder / n / 'run'}", *more] for n, more in variants]))
    script = str(ROOT / "tests/support/trainings.py")
    done = run([script, str(listed), "1"], size=size, launcher=launcher, cwd=folder, environment=_ROOT)
    return done.stdout + done.stderr
