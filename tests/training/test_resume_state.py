"""Going on from memory, on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.comm.rounds import OneRound
from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import parse_object
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.past_journal import read_journal
from hvdtrain.observe.progress import Progress as Display
from hvdtrain.observe.recorder import Recorder
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.training.elastic.worker_state import make_worker_state
from hvdtrain.training.round import Round
from hvdtrain.training.start.restore import resume_state
from hvdtrain.training.start.run_directory import claim_run_directory
from tests.support.toy import toy


@pytest.mark.parametrize("moved", [True, False])
def test_a_run_folder_left_on_another_host_is_reported_and_can_be_resumed(moved: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = parse_object({"task": "toy", "run_dir": str(folder)}, None)
    claim = claim_run_directory(run)
    if not moved:
        claim.write_config(run)
    worker = make_worker_state(run, toy(), torch.device("cpu"), RankInfo())
    worker.step = worker.state.progress.step = 7
    display = Display("samples", 5.0, live=False, quiet=True)
    recorder = Recorder(Journal(folder / "journal.jsonl", display.say), display)
    store = CheckpointStore(folder / "checkpoints", pytest.fail)
    current = Round(run, worker, OneRound(SoloComm()), SoloComm())
    current.store, current.claim, current.recorder, current.spans = store, claim, recorder, Spans()
    assert resume_state(current) == 7
    recorder.close()
    claim.release()
    lines: list[dict[str, Any]] = read_journal(folder / "journal.jsonl")
    assert [line["event"] for line in lines] == (["warning"] if moved else []) + ["resumed"]
    assert claim.old_config() is not None
