"""What a resume refuses, and what it says of the learning rate; ranks are threads."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hvdtrain
from hvdtrain import Task
from hvdtrain.config.parse import parse_argv
from hvdtrain.errors import (
    CheckpointError,
    ConfigError,
    RunDirectoryError,
    UnreadableCheckpointError,
    UnusableRunDirectoryError,
)
from hvdtrain.files import write_text
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.training.api import _options
from hvdtrain.training.result import Result
from tests.support.gallery import TOY
from tests.support.journals import read_events, read_losses
from tests.support.recorded import recorded
from tests.support.thread_job import train_on_threads

OPTIONS = (*TOY[:3], "--checkpoint.every=0", "--optimizer.warmup_steps=0")


_VERSION_3 = 0x20080522
_OVERRIDE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, see capabilities(7)."""


@contextmanager
def permissions_held() -> Iterator[None]:
    """Inside, this thread, and those it starts, may open files only as their modes say."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    before = sets[0]
    sets[0] &= ~_OVERRIDE  # of the effective set; the permitted one keeps them
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0


def _train(folder: Path, *options: str, size: int = 1) -> Result:
    return train_on_threads(*OPTIONS, f"--run_dir={folder}", *options, size=size)[0]


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    _train(folder, "--train.steps=6")
    return folder


class _Compiled(nn.Module):
    """Has the names that torch.compile gives, which takes seconds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)  # type: ignore[no-any-return]


def _wrapped(task: Task, first: bool) -> Task:
    return replace(task, model=nn.DataParallel(_Compiled(task.model)) if first else task.model)


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_is_compiled_and_wrapped_resumes_a_plain_one(first: bool, tmp_path: Path) -> None:
    """And the other way round, to the bit, with the state of its optimizer, of a compression and of a callback."""
    losses = []
    for changes in (False, True):
        options = (*OPTIONS, f"--run_dir={tmp_path / str(changes)}", "--parallel.compression=int8", "--train.ema=0.9")
        for steps, wrap in ((3, first), (6, first ^ changes)):
            torch.manual_seed(1)
            made = [_wrapped(recorded(), wrap) for _ in range(2)]
            train_on_threads(*options, "--train.steps=6", f"--train.stop_at={steps}", size=2, build=made.__getitem__)
        run = tmp_path / str(changes)
        losses.append([*read_losses(run), read_events(run, "evaluation")[-1]["metrics"]["ema_loss"]])
    assert losses[0] == losses[1]


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(original, tmp_path / "run")
    for name in ("config.yaml", "journal.jsonl"):
        (copy / name).write_text((copy / name).read_text().replace(str(original), str(copy)))
    return copy


@pytest.mark.parametrize(
    ("options", "what", "following"),
    [
        (["--train.steps=6", "--seed=1"], "seed: 0 -> 1", "--train.steps 12"),
        (["--train.steps=4"], "--train.steps 4", "--train.steps 10"),
        (["--train.steps=6", "--train.stop_at=4"], "--train.stop_at 4", "--train.stop_at 10"),
        (["--train.steps=9", "--train.stop_at=4"], "--train.stop_at 4", "--train.stop_at null"),
        (["--train.epochs=0.5"], "--train.epochs 0.5, which are 3 steps", "--train.epochs 1.5"),
    ],
)
def test_a_command_that_would_train_nothing_changes_nothing(
    options: list[str], what: str, following: str, run: Path
) -> None:
    before = _content(run)
    with pytest.raises(ConfigError, match=what) as caught:
        _train(run, *options, size=2)
    assert caught.value.next_step is not None and following in caught.value.next_step
    assert "--resume never --run_dir NEW" in caught.value.next_step
    after = _content(run)
    assert {name: after[name] for name in before} == before


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    ("resume", "run_dir"),
    [("nowhere", []), ("empty", ["--run_dir=new"]), ("run/checkpoints/step-000006/state.json", ["--run_dir=new"])],
)
def test_a_resume_from_no_checkpoint_is_refused_and_writes_nothing(
    resume: str, run_dir: list[str], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="invalid --resume"):
        train_on_threads(*OPTIONS, *run_dir, f"--resume={resume}", "--train.steps=8", size=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_with_checkpoints_needs_no_longer_what_it_began_from(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    _train(new, f"--resume={run}", "--train.steps=12", "--train.stop_at=9")
    shutil.rmtree(run)
    assert _train(new, f"--resume={run}", "--train.steps=12").resumed_at == 9


@pytest.mark.parametrize(
    ("journal", "warning"),
    [
        (lambda text: "not a journal\n" * 3, "3 line(s) of"),
        (lambda text: text + "\0" * 40, "1 line(s) of"),
        (lambda text: text.replace('{"step":3', '{"step";3'), "1 line(s) of"),
        (lambda text: text + '{"foo": 1}\n', "1 line(s) of"),
        (lambda text: text + '{"step": 6}\n{"event": "odd"}\n', ""),  # without time
        (lambda text: text[:-9], ""),  # cut off by a kill
    ],
    ids=["garbage", "zeros", "damaged step", "of another program", "edited", "cut off"],
)
def test_a_resume_reports_lines_of_the_journal_that_it_cannot_read(
    journal: Callable[[str], str], warning: str, run: Path
) -> None:
    file = run / "journal.jsonl"
    file.write_text(journal(file.read_text()))
    assert _train(run, "--train.steps=8", size=2).resumed_at == 6
    found = [event["text"] for event in read_events(run, "warning") if "cannot be read" in event["text"]]
    assert [warning in text and str(file) in text for text in found] == [True] * bool(warning)


@pytest.mark.parametrize("odd", ["a file", "a dangling link", "not listed", "not writable"])
def test_a_folder_of_checkpoints_that_cannot_be_used_is_refused_at_the_start(odd: str, run: Path) -> None:
    folder = run / "checkpoints"
    if odd.startswith("a "):
        shutil.rmtree(folder)
        folder.write_text("x") if odd == "a file" else folder.symlink_to(run / "gone")
    else:
        folder.chmod(0o300 if odd == "not listed" else 0o500)
    before = _content(run)
    with permissions_held(), pytest.raises(RunDirectoryError, match="the folder of checkpoints") as caught:
        _train(run, "--train.steps=8", size=2)
    assert str(folder) in caught.value.what
    assert isinstance(caught.value, UnusableRunDirectoryError) == (odd != "a dangling link")
    after = _content(run)
    assert {name: after[name] for name in before} == before
    if folder.is_dir():
        folder.chmod(0o700)
        assert _train(run, "--train.steps=8").resumed_at == 6


@pytest.mark.parametrize("name", ["journal.jsonl", "config.yaml", "checkpoints/step-000006/model.safetensors"])
def test_a_file_without_permission_is_named_and_left_where_it_is(name: str, run: Path) -> None:
    (run / name).chmod(0)
    before = set((run / "checkpoints").rglob("*"))
    expected = UnreadableCheckpointError if name.startswith("checkpoints") else UnusableRunDirectoryError
    with permissions_held(), pytest.raises(expected, match="Permission denied") as caught:
        _train(run, "--train.steps=8", size=2)
    assert str((run / name).parent) in caught.value.what
    assert set((run / "checkpoints").rglob("*")) == before
    (run / name).chmod(0o600)
    assert _train(run, "--train.steps=8").resumed_at == 6


@pytest.mark.parametrize(("file", "is_new"), [("config.yaml", False), (".identity", True)])
def test_a_disk_that_is_full_at_the_start_is_named(
    file: str, is_new: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_text(path, text)

    monkeypatch.setattr("hvdtrain.training.start.run_directory.write_text", full)
    where = run.with_name("new") if is_new else run
    with pytest.raises(RunDirectoryError, match="No space left on device") as caught:
        _train(where, "--train.steps=8", size=2)
    assert str(where) in caught.value.what
    assert not isinstance(caught.value, UnusableRunDirectoryError), "the launcher may try again"


@pytest.mark.parametrize(("how", "size"), [("moved", 1), ("removed", 1), ("moved, and another is there", 2)])
def test_a_folder_that_is_moved_or_removed_ends_the_run(how: str, size: int, tmp_path: Path) -> None:
    """At the next save: else a second job could train into the old name, or half a folder is left."""
    run, there = tmp_path / "run", tmp_path / "there"

    class Mover(hvdtrain.Callback):
        def on_step(self, training: Any, record: Any) -> None:
            if training.step == 3 and training.rank == 0:
                while not (run / "checkpoints/step-000002").exists():  # it is being written
                    time.sleep(0.01)
                while how == "removed" and run.exists():  # threads of the run may write into it meanwhile
                    shutil.rmtree(run, ignore_errors=True)
                if how != "removed":
                    run.rename(there)
                if how.endswith("another is there"):
                    shutil.copytree(there, run)

    options = (*OPTIONS, f"--run_dir={run}", "--train.steps=8", "--checkpoint.every=2")
    with pytest.raises(RunDirectoryError, match="removed" if how == "removed" else "moved") as caught:
        train_on_threads(*options, size=size, callbacks=[Mover()])
    assert (f"--run_dir {there}" in str(caught.value)) == (how != "removed")
    assert not list(run.glob("checkpoints/step-000004")) and not list(there.glob("checkpoints/step-000004"))
    if how == "moved":
        assert train_on_threads(*options, f"--run_dir={there}", size=size)[0].resumed_at == 2


def test_no_other_user_can_hold_the_lock(run: Path) -> None:
    """flock needs only the right to read."""
    (run / ".lock").chmod(0o644)
    _train(run, "--train.steps=8")
    assert (run / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_run_of_another_user_is_passed_over(own_folder: Path) -> None:
    others = own_folder / "runs" / "20990101-000000-theirs"
    others.mkdir(parents=True)
    (others / ".identity").write_text("of another config")
    others.chmod(0)
    with permissions_held():
        result = train_on_threads(*OPTIONS, "--train.steps=2", size=1)[0]
    others.chmod(0o700)
    assert result.run_dir.parent.samefile("runs")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--train.steps=4", "--optimizer.beta1=0.8"), "first has step 2 of 2 with other options: train.steps: 2 -> 4"),
        (("--train.steps=2", "--optimizer.beta1=0.9"), "second has step 2 of 2 with other options: optimizer.lr"),
        (("--train.steps=2", "--optimizer.beta1=0.9", "--resume=never"), None),
        (("--train.clip=3", "--optimizer.beta1=0.7", "--seed=4", "--train.ema=0.5", "--train.steps=3"), None),
    ],
)
def test_a_new_run_names_the_run_that_the_user_may_have_meant(
    options: tuple[str, ...], named: str | None, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*OPTIONS, "--checkpoint.every=2"]
    for name, *own in (("first", "--optimizer.beta1=0.8"), ("second", "--optimizer.lr=0.5", "--optimizer.beta1=0.9")):
        train_on_threads(*common, "--train.steps=2", f"--run_dir=runs/{name}", *own, size=1)
    capsys.readouterr()
    train_on_threads(*common, *options, size=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a new run")]
    assert len(lines) == (named is not None)
    if named:
        place, *_ = named.split()
        assert f"runs/{named}" in lines[0] and lines[0].endswith(f"--run_dir runs/{place}")


def test_the_command_of_a_finished_run_shows_its_result_again(run: Path, tmp_path: Path) -> None:
    """Another run that is at the end already is refused."""
    config = (run / "config.yaml").read_bytes()
    result = _train(run, "--train.steps=6", "--observe.line_every_s=1")
    assert (result.step, result.reason) == (6, "finished")
    assert (run / "config.yaml").read_bytes() == config
    assert len(read_steps(run / "journal.jsonl")) == 6
    with pytest.raises(ConfigError, match=r"nothing to train: .* step 6"):
        _train(tmp_path / "new", f"--resume={run}", "--train.steps=6")


def test_an_extended_run_reports_the_change_of_the_learning_rate(run: Path, tmp_path: Path) -> None:
    """What it recommends to train on keeps the rate."""
    recommended = shutil.copytree(run, tmp_path / "recommended")
    _train(run, "--train.steps=12", "--train.stop_at=7")
    lrs = [line["lr"] for line in read_steps(run / "journal.jsonl").values()]
    assert lrs[6] > 2 * lrs[5], "a schedule over more steps raises it"
    (warned,) = [event["text"] for event in read_events(run, "warning") if "schedule has changed" in event["text"]]
    more = f"--optimizer.schedule constant --optimizer.lr {lrs[5]:.6g}"
    assert f"was {lrs[5]:.4g} at step 6, and is {lrs[6]:.4g} at the next" in warned and more in warned
    train_on = _train(recommended, "--train.steps=6").train_on
    assert train_on == f"--train.steps 12 {more}"
    _train(recommended, *train_on.split())
    lrs = [line["lr"] for line in read_steps(recommended / "journal.jsonl").values()]
    assert len(lrs) == 12 and lrs[6:] == pytest.approx([lrs[5]] * 6, rel=1e-4)


@pytest.mark.parametrize("kept", [True, False])
def test_checkpoints_behind_a_link_are_found(kept: bool, tmp_path: Path) -> None:
    """Without its disk, training does not start again from step 1."""
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    run.mkdir()
    (run / "checkpoints").symlink_to(scratch)
    _train(run, "--train.steps=6", "--train.stop_at=4")
    if kept:
        _train(run, "--train.steps=6")
        assert sorted(path.name for path in scratch.glob("step-*")) == ["step-000004", "step-000006"]
        return
    for path in scratch.glob("step-*"):  # the folder on which its disk was mounted
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="at step 4"):
        _train(run, "--train.steps=6")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    _train(tmp_path, "--train.steps=6", "--train.stop_at=4")
    shutil.rmtree(tmp_path / "checkpoints")
    journal = tmp_path / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"checkpoint"' not in line]
    journal.write_text("".join(lines))
    assert _train(tmp_path, "--train.steps=6").resumed_at == 0


def test_a_run_extended_before_the_decay_of_wsd_equals_a_long_one(tmp_path: Path) -> None:
    """Bit for bit, and no change of the learning rate is reported. Within the decay, it is."""
    options = ("--optimizer.schedule=wsd", "--optimizer.decay=0.4", "--optimizer.warmup_steps=2")
    _train(tmp_path / "long", *options, "--train.steps=20")
    _train(tmp_path / "extended", *options, "--train.steps=10", "--train.stop_at=5")
    _train(tmp_path / "extended", *options, "--train.steps=20", "--train.stop_at=18")
    _train(tmp_path / "extended", *options, "--train.steps=40", "--train.stop_at=19")
    long, extended = (read_steps(tmp_path / name / "journal.jsonl") for name in ("long", "extended"))
    for step in range(1, 19):
        assert [long[step][key] for key in ("loss", "lr")] == [extended[step][key] for key in ("loss", "lr")]
    warnings = [event["text"] for event in read_events(tmp_path / "extended", "warning")]
    (warned,) = [text for text in warnings if "schedule has changed" in text]
    assert "at step 18" in warned


def test_the_config_of_a_run_folder_resumes_that_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any working directory, by a command line or a program; whatever the folder was called when it was made."""
    moved = run.rename(run.with_name("moved"))
    config = moved / "config.yaml"
    monkeypatch.chdir(moved.parent)
    found = parse_argv([f"--config={config}", "--train.steps=8"], recorded).config
    assert (found.run_dir, found.train.steps) == (str(moved), 8)
    assert parse_argv(["--config", str(config), "--run_dir=other"], recorded).config.run_dir == "other"
    assert parse_argv(["--config", str(config), "--resume=never"], recorded).config.run_dir == str(run)
    assert _options(config)["run_dir"] == str(moved)
    copy = moved.parent / "config.yaml"
    copy.write_bytes(config.read_bytes())
    assert parse_argv(["--config", str(copy)], recorded).config.run_dir == str(run), "a copy is not the run's own"
