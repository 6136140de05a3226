"""Actions of a training rank, from Python's audit events: no pickle, no port, no shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.audited import audited, of_launcher, seen
from tests.support.gallery import Gallery
from tests.support.journals import read_journal
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, program, run, train

TOY = (
    *(f"--task={ROOT}/tests/support/toy.py:toy", "--run_dir=run", "--samples=41", "--train.steps=6"),
    *("--train.global_batch=8", "--train.micro_batch=2", "--checkpoint.every=3"),
)
LISTENING = f"--task={ROOT}/tests/support/toys.py:listening"
"""The toy, which writes what its rank listens on."""
LM = ("--run_dir=lm", "--model.preset=tiny", "--data.text=*.txt", "--data.seq_len=16", "--train.steps=2")

OF_CONCERN = ("pickle.find_class", "socket.bind", "os.system", "subprocess.Popen")


def test_two_ranks_of_mpirun_unpickle_nothing_open_no_port_and_start_no_shell(gallery: Gallery) -> None:
    assert not [line for event in OF_CONCERN for line in seen(gallery["two"].folder / "audit", event)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", "mpirun", "horovodrun --gloo"])
def test_a_rank_unpickles_nothing_opens_no_port_and_starts_no_shell(launcher: str, tmp_path: Path) -> None:
    file, size = tmp_path / "audit", 1 + (launcher != "none")
    for stop_at in ("--train.stop_at=3", "--train.stop_at=null"):  # the second start reads what the first has saved
        train(LISTENING, *TOY[1:], stop_at, size=size, launcher=launcher, cwd=tmp_path, environment=audited(file))
    for event in OF_CONCERN:
        lines = seen(file, event)
        assert len(lines) == len(of_launcher(lines)), lines
    # horovodrun does all of it itself: the ranks' silence is no deafness of the test's
    assert bool(seen(file, "pickle.find_class")) == (launcher == "horovodrun --gloo")
    found = [json.loads(facts.read_text()) for facts in tmp_path.glob("listening-*.json")]
    assert len(found) == 2 * size and not any(facts["notifications"] for facts in found)
    assert launcher == "mpirun" or not any(facts["ports"] for facts in found)


@pytest.mark.slow
def test_a_language_model_unpickles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    (tmp_path / "a.txt").write_text("some words to learn from, again and again. " * 200)
    train(*LM, cwd=tmp_path, environment=audited(tmp_path / "audit"))
    assert seen(tmp_path / "audit", "pickle.find_class") == []


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.slow
def test_a_gloo_job_of_horovodrun_warns_once_of_its_open_port(elastic: bool, tmp_path: Path) -> None:
    where = ["--network-interface", "lo", "--host-discovery-script", "./hosts", "--min-np", "1", "--max-np", "1"]
    (tmp_path / "hosts").write_text("#!/bin/sh\necho localhost:1\n")
    (tmp_path / "hosts").chmod(0o755)
    command = [program("horovodrun"), "--gloo", "-np", "1", *(where if elastic else ["-H", "localhost:1"])]
    done = subprocess.run(
        [*command, sys.executable, "-m", "hvdtrain", *TOY],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("listens on all interfaces") == 1
    assert ("CVE-2024-10190" in done.stdout) == elastic
    journal = read_journal(tmp_path / "run/journal.jsonl")
    assert len([line for line in journal if "all interfaces" in line.get("text", "")]) == 1


@pytest.mark.slow
def test_under_our_driver_a_rank_opens_no_port_and_unpickles_nothing(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    launch = ["-m", "hvdtrain", "launch", "--to", "hvdtrain", "-np", "2", "--", LISTENING, *TOY[1:]]
    done = run(launch, cwd=tmp_path, environment=audited(file))
    found = [json.loads(facts.read_text()) for facts in tmp_path.glob("listening-*.json")]
    assert [(facts["ports"], facts["notifications"]) for facts in found] == [([], False)] * 2
    assert all(peer.startswith("127.") for facts in found for peer in facts["peers"])
    for event in ("pickle.find_class", "os.system", "subprocess.Popen"):
        assert seen(file, event) == []
    assert {line["what"][0] for line in seen(file, "socket.bind")} == {"127.0.0.1"}
    assert "all interfaces" not in done.stdout + done.stderr
