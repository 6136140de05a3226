"""Training on a mixture of conversations: equal on any number of ranks, and bit-identical after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hvdtrain.data.sample_order import SampleOrder
from tests.support.gallery import Recorded
from tests.support.thread_job import train_on_threads

pytest.importorskip("transformers", reason="the transformers library is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")


def _options(folder: Path) -> list[str]:
    """Conversations whose numbers of counted tokens differ."""
    for source, words in (("code", 4), ("prose", 23)):
        rows = [{"prompt": f"{source}{i}", "completion": "word " * (1 + (words * i) % 29)} for i in range(24)]
        (folder / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"--data.chat=['{folder}/code.jsonl', '{folder}/prose.jsonl']", "--data.weights=[0.25, 0.75]"]


def _train(folder: Path, *options: str, size: int) -> Recorded:
    common = ("--model.preset=tiny", "--train.epochs=0.2", "--train.global_batch=6", "--data.seq_len=96")
    common += ("--optimizer.warmup_steps=1", "--optimizer.name=sgd", "--train.eval_samples=2")
    train_on_threads(*common, f"--run_dir={folder / 'run'}", *options, size=size)
    return Recorded(folder, 0, "", "")


def test_the_curve_depends_neither_on_ranks_nor_on_a_resume(tmp_path: Path) -> None:
    data = _options(tmp_path)
    one = _train(tmp_path / "one", *data, "--train.micro_batch=6", size=1)
    two = _train(tmp_path / "two", *data, "--train.micro_batch=1", size=2)
    assert two.losses() == pytest.approx(one.losses(), rel=2e-6)
    _train(tmp_path / "again", *data, "--train.micro_batch=1", "--train.stop_at=1", size=2)
    again = _train(tmp_path / "again", *data, "--train.micro_batch=1", size=2)
    assert again.losses() == two.losses()
    assert one.losses()[-1] < one.losses()[0]
    header = json.loads((one.run / "ledger" / "start-0000.rank-00000.jsonl").read_text().partition("\n")[0])
    epoch = SampleOrder(header["samples"], header["sources"], 0).epoch_samples
    assert len(one.losses()) == math.ceil(0.2 * epoch / 6) > math.ceil(0.2 * header["samples"] / 6)
