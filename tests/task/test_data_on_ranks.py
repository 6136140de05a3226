"""Training on a mixture of separate documents: equal on any number of ranks, and bit-identical after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gallery import Recorded
from tests.support.thread_job import train_on_threads

pytest.importorskip("transformers", reason="the transformers library is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")


def _options(folder: Path) -> list[str]:
    for source, words in (("code", 4), ("prose", 23)):
        (folder / source).mkdir()
        for number in range(12):
            text = " ".join(f"{source}{number}{word}" for word in range(words + number))
            (folder / source / f"{number}.txt").write_text(text)
    return [
        f"--data.text=['{folder}/code/*', '{folder}/prose/*']", "--data.weights=[0.25, 0.75]",
        "--data.documents=separate",
    ]  # fmt: skip


def _train(folder: Path, *options: str, size: int) -> Recorded:
    common = ("--model.preset=tiny", "--train.steps=3", "--train.global_batch=6", "--data.seq_len=24")
    common += ("--optimizer.warmup_steps=1", "--optimizer.name=sgd", "--train.eval_samples=3")
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
