"""The batches of a rank: one may be drawn ahead, while a device works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.loader import Stream
from hvdtrain.errors import DataError
from hvdtrain.spans import Spans
from hvdtrain.state.ledger import Ledger
from hvdtrain.state.train_state import Progress
from hvdtrain.training.loop.feed import Feed


class _Samples(Dataset[Tensor]):
    broken = -1  # the number of reads after which one fails

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        if self.reads == self.broken:
            raise DataError("a broken sample", expected="a number", found="none")
        return torch.tensor(index)


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Callable[..., Feed]]:
    ledgers = []

    def make(samples: _Samples, folder: str) -> Feed:
        ledgers.append(Ledger(tmp_path / folder, print))
        worker = SimpleNamespace(task=SimpleNamespace(collate=None), device=torch.device("cpu"))
        worker.state = SimpleNamespace(progress=Progress())
        run = SimpleNamespace(config=SimpleNamespace(loader=LoaderConfig(workers=0)))
        current: Any = SimpleNamespace(worker=worker, run=run, comm=SoloComm(), spans=Spans())
        made = Feed(current, Stream(samples, 0, 4, 2, 0, 1), ledgers[-1])
        made.begin(Progress(), 5, "started")
        return made

    yield make
    for ledger in ledgers:
        ledger.close()


def _draw(feed: Feed, step: int) -> list[list[int]]:
    return [batch.tolist() for _, batch in feed.draw(next(feed.shares).batches, step)]


def test_a_batch_drawn_ahead_is_the_next_one(feed: Callable[..., Feed], tmp_path: Path) -> None:
    plain, other = feed(_Samples(), "plain"), feed(samples := _Samples(), "other")
    for step in range(1, 6):
        assert _draw(plain, step) == _draw(other, step)
        reads = samples.reads
        other.ahead()
        assert samples.reads == (reads + 2 if step < 5 else reads)
    other.begin(Progress(), 5, "rolled_back")  # from the first one again
    plain.begin(Progress(), 5, "rolled_back")
    assert _draw(plain, 1) == _draw(other, 1)
    written = [[path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in ("plain", "other")]
    assert written[0] == written[1]


def test_an_error_of_a_batch_drawn_ahead_belongs_to_its_step(feed: Callable[..., Feed]) -> None:
    samples = _Samples()
    samples.broken = 5
    made = feed(samples, "broken")
    _draw(made, 1)
    made.ahead()
    with pytest.raises(DataError, match="broken"):
        _draw(made, 2)
