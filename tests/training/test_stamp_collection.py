"""The link between ranks is measured once for as many ranks of the same hosts, however often they meet."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.observe.progress import Progress
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.spans import Spans
from hvdtrain.training.records import observers as stamps
from hvdtrain.training.records.observers import add_stamps
from hvdtrain.training.round import Round
from tests.support.thread_comm import ThreadComm, on_ranks

Links = dict[tuple[str, ...], list[tuple[int, float]]]


def _meet(folder: Path, known: list[Links], started_at: int = 0) -> list[object]:
    """A round of as many ranks as there is knowledge; the link that rank 0 left of it."""

    def body(comm: ThreadComm) -> None:
        recorder = Recorder(None, Progress("samples", 60.0, live=False, quiet=True))
        progress = SimpleNamespace(step=started_at)
        state = SimpleNamespace(model=nn.Linear(1, 1), progress=progress)
        current = SimpleNamespace(
            run=SimpleNamespace(config=Config()),
            worker=SimpleNamespace(device=torch.device("cpu"), state=state, links=known[comm.rank], compiled=0),
            comm=comm,
            layout=RunLayout(folder),
            spans=Spans(),
            recorder=recorder,
            stop=100,
        )
        add_stamps(cast(Round, current))
        recorder.close()

    on_ranks(len(known), body)
    lines = [json.loads(line) for line in (folder / "timeline" / "steps.jsonl").read_text().splitlines()]
    link: list[object] = [line for line in lines if "link" in line][-1]["link"]
    return link


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that measured."""
    found: list[int] = []
    measure = stamps.probe_link

    def probe(comm: ThreadComm, device: torch.device, budget_s: float) -> list[tuple[int, float]]:
        found.append(comm.rank)
        return measure(comm, device, budget_s)

    monkeypatch.setattr(stamps, "probe_link", probe)
    return found


def test_a_new_rank_gets_the_link_measured_by_rank_0(tmp_path: Path, probes: list[int]) -> None:
    """Another number of ranks is another link. A rank 0 that knows nothing measures with all."""
    survivor, newcomer = Links(), Links()
    first = _meet(tmp_path, [survivor, {}])
    assert sorted(probes) == [0, 1] and len(first) >= 2
    assert _meet(tmp_path, [survivor]) == []
    assert _meet(tmp_path, [survivor, newcomer], started_at=3) == first
    assert sorted(probes) == [0, 1]
    assert [[list(part) for part in link] for link in newcomer.values()] == [first]
    probes.clear()
    _meet(tmp_path, [survivor, {}, {}], started_at=6)
    assert sorted(probes) == [0, 1, 2]
    probes.clear()
    _meet(tmp_path, [{}, survivor], started_at=9)
    assert sorted(probes) == [0, 1]
