from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.cli.generate import main
from hvdtrain.errors import ConfigError
from hvdtrain.task.causal_lm import load_model
from hvdtrain.task.saved_model import find_model
from tests.support.gallery import LANGUAGE
from tests.support.thread_job import train_on_threads

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

PROMPT = "def größer("


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run") / "run"
    train_on_threads(*LANGUAGE, "--train.steps=4", f"--run_dir={folder}", size=1)
    return str(folder)


def _text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main([*argv]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_the_likeliest_tokens(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor([list(PROMPT.encode())])
    model: Any = load_model(find_model(run)).eval()
    for _ in range(12):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_model(run).folder)
    found = _text(capsys, run, "--prompt", PROMPT, "--temperature", "0", "--tokens", "12")
    assert found == tokenizer.decode(ids[0]) and found.startswith(PROMPT)


def test_a_seed_repeats_samples(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (_text(capsys, run, "--prompt", PROMPT, "--tokens", "20", "--seed", seed) for seed in "12")
    assert first != second
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert _text(capsys, run, "--prompt", "-", "--tokens", "20", "--seed", "1") == first


def test_what_is_refused(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(find_model(run).folder / name, bare)
    for argv, text in (
        ([run, "--prompt", ""], "the prompt is empty"),
        ([run, "--prompt", "a", "--tokens", "1024"], "too long for the model"),
        ([str(bare), "--prompt", "a"], "has no tokenizer"),
        (["nowhere", "--prompt", "a"], "there is no model in 'nowhere'"),
    ):
        with pytest.raises(ConfigError, match=text):
            main(argv)
    for wrong in (["--tokens", "0"], ["--temperature", "-1"], ["--device", "tpu"]):
        with pytest.raises(SystemExit):
            main([run, "--prompt", "a", *wrong])
