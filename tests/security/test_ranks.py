"""What a rank does while it trains, seen by Python's own audit events: no pickle, no port, no shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.audited import audited, of_launcher, seen
from tests.support.launch import ROOT, train

TOY = (
    f"--task={ROOT}/tests/support/toy.py:toy",
    "--run_dir=run",
    "--samples=41",
    "--train.steps=6",
    "--train.global_batch=8",
    "--train.micro_batch=2",
    "--checkpoint.every=3",
)
LM = ("--run_dir=lm", "--model.preset=tiny", "--data.text=*.txt", "--data.seq_len=16", "--train.steps=2")


@pytest.mark.parametrize("launcher", ["none", "mpirun", "horovodrun --gloo"])
def test_a_rank_unpickles_nothing_opens_no_port_and_starts_no_shell(launcher: str, tmp_path: Path) -> None:
    file = tmp_path / "audit"
    for stop_at in ("--train.stop_at=3", "--train.stop_at=null"):  # the second start reads what the first has saved
        train(*TOY, stop_at, size=1 + (launcher != "none"), launcher=launcher, cwd=tmp_path, environment=audited(file))
    for event in ("pickle.find_class", "socket.bind", "os.system", "subprocess.Popen"):
        lines = seen(file, event)
        assert len(lines) == len(of_launcher(lines)), lines
    # horovodrun does all of it itself: the ranks' silence is no deafness of the test's
    assert bool(seen(file, "pickle.find_class")) == (launcher == "horovodrun --gloo")


def test_a_language_model_unpickles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    (tmp_path / "a.txt").write_text("some words to learn from, again and again. " * 200)
    train(*LM, cwd=tmp_path, environment=audited(tmp_path / "audit"))
    assert seen(tmp_path / "audit", "pickle.find_class") == []


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_horovods_notification_service_never_runs(launcher: str, tmp_path: Path) -> None:
    task = f"--task={ROOT}/tests/support/listening.py:build"
    train(task, *TOY[1:], size=2, launcher=launcher, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    found = [json.loads(file.read_text()) for file in tmp_path.glob("listening-*.json")]
    assert len(found) == 2 and not any(facts["notifications"] for facts in found)
    if launcher == "horovodrun --gloo":
        assert [facts["ports"] for facts in found] == [[], []]
