"""Each row of docs/cookbook.md trains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.support.gallery import LANGUAGE
from tests.support.launch import ROOT
from tests.support.thread_job import train_on_threads
from tests.test_readme import CALLBACK

PAGE = (ROOT / "docs" / "cookbook.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| `(--[^`]+)` \| \[", PAGE, re.MULTILINE)
(FROZEN,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the rows name."""
    import pyarrow.parquet
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("cookbook")
    for name in ("mine/a.txt", "code/a.py", "prose/a.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(f"some words of {name}\n" * 400)
    for name in ("a.npy", "b.npy"):
        np.save(folder / name, np.random.default_rng(0).integers(0, 256, 9000).astype(np.uint16))
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (folder / "talks").mkdir()
    (folder / "talks" / "a.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 200)
    (folder / "rows").mkdir()
    (folder / "rows" / "a.jsonl").write_text(json.dumps({"text": "some words " * 400}) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words " * 40]}), folder / "valid.parquet")
    (folder / "mine.py").write_text(CALLBACK)
    (folder / "frozen.py").write_text(FROZEN)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).save_pretrained(folder / "llama")
    train_on_threads(*LANGUAGE, "--train.steps=2", f"--run_dir={folder / 'runs' / 'pre'}", size=1)
    return folder


def test_the_rows_are_found() -> None:
    assert len(ROWS) == 22


@pytest.mark.slow
@pytest.mark.parametrize("options", [options for _, options in ROWS], ids=[task for task, _ in ROWS])
def test_each_row(options: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    given = shlex.split(options)
    small = {"--train.steps": "2", "--train.eval_samples": "4", "--train.global_batch": "4", "--train.micro_batch": "2"}
    small |= {} if "--model.from" in given else {"--model.preset": "tiny"}
    small |= {"--run_dir": str(tmp_path / "run"), "--data.seq_len": "32"}
    missing = [f"{name}={value}" for name, value in small.items() if name not in given]
    (result, *_) = train_on_threads(*given, *missing, size=2)
    assert result.step == 2 and np.isfinite(result.last_loss)


@pytest.mark.slow
def test_frozen_layers_stay(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (command,) = re.findall(r"```sh\npython -m hvdtrain (.*)\n```", PAGE)
    options = (*shlex.split(command), "--train.steps=2", "--train.eval_samples=4", "--data.seq_len=32")
    (result,) = train_on_threads(*options, f"--run_dir={tmp_path / 'run'}", size=1)
    assert result.step == 2
