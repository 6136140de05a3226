"""What can be written for a compression."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.compression.coding_probe import measure_coding
from hvdtrain.compression.none import Plain
from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import TABLE, Compression, Kind, auto_candidates, choices, parse
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.evidence import Change
from hvdtrain.timeline.whatif.predict import choose_compression, predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.compression import bucket
from tests.support.compression_contract import CLAUSES
from tests.support.thread_comm import on_ranks
from tests.support.whatif_run import run_folder


@pytest.mark.parametrize("kind", TABLE.values(), ids=lambda k: k.name)
def test_each_is_understood_as_it_is_written(kind) -> None:  # type: ignore[no-untyped-def]
    written = str(parse(kind.name))
    assert parse(written) == parse(kind.name)
    assert parse(written).kind is kind
    assert any(choice.startswith(kind.name) for choice in choices())


@pytest.mark.parametrize(
    "text",
    ["", "fp17", "fp16:", "fp16:2", "none:0", ":4", "FP16", "topk:0", "topk:1.1", "topk:nan", "powersgd:1.5", "topk:x"],
)
def test_what_is_none_names_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert repr(text) in error.value.what
    assert all(name in str(error.value.expected) for name in TABLE)


def test_a_number_is_taken_and_otherwise_the_default() -> None:
    assert parse("topk").number == parse("topk:0.01").number
    assert str(parse("topk:0.002")) == "topk:0.002"
    assert str(parse("powersgd:8")) == "powersgd:8"


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> str:
    """A compressor that nobody has measured, with nothing but its file and its line."""

    class Doubled(Plain):
        """Sums in float64."""

        def make_work(self) -> torch.Tensor:
            return self.shape.zeros(dtype=torch.float64)

    file = ModuleType("hvdtrain.compression.made_up")
    file.Doubled = Doubled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    line = Kind("doubled", "made_up:Doubled", lambda b, ranks, number: {"allreduce": 8 * b.length}, 1e-6, auto=True)
    monkeypatch.setitem(TABLE, line.name, line)
    return line.name


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_a_line_is_enough_for_the_contract(made_up: str, clause: Callable[[Comm, Compression], None]) -> None:
    on_ranks(2, lambda comm: clause(comm, parse(made_up)))


def test_a_line_is_enough_to_predict_measure_and_choose(made_up: str, tmp_path: Path) -> None:
    evidence = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=9.0))
    prediction = predict(evidence, Change(compression=made_up))
    assert prediction.then.handed_bytes == pytest.approx(2 * prediction.now.handed_bytes)
    assert prediction.then.step_s > prediction.now.step_s
    compression = parse(made_up)
    estimate = compression.estimate_coding(Bucket([(64,)], "float32", 64), [256], 2, 1e-10)
    assert len(estimate.before_s) == len(estimate.during_s) == 1
    (measured,) = measure_coding(compression, [bucket([(64,)])], [[torch.ones(64)]], 2)
    assert len(measured.before_s) == len(measured.during_s) == 1
    assert made_up in auto_candidates()
    chosen, predicted = choose_compression(evidence, auto_candidates(), lambda *_: None)
    assert predicted[made_up].step_s > predicted["none"].step_s
    assert chosen != made_up


def test_the_table_needs_no_torch() -> None:
    program = "import sys, hvdtrain.compression.table; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
