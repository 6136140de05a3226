"""Tokens that are made ahead are those of training, made once, and again only from where a kill was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.__main__ import main
from hvdtrain.task import encode, token_file
from hvdtrain.task.corpus import open_corpus, prepare_corpus
from hvdtrain.task.text_config import TextConfig
from tests.task.test_tokenizer_and_dataset import train_tokenizer


@pytest.fixture(params=["rows", "files", "one file"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextConfig:
    monkeypatch.setattr("hvdtrain.task.text_sources._PIECE_BYTES", 200)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 500)
    texts = [f"document {i} says\n" * (3 + i % 5) for i in range(40)]
    folder = tmp_path / "data"
    folder.mkdir()
    if request.param == "rows":
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif request.param == "one file":
        (folder / "a.txt").write_text("".join(texts))
    else:
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
    train_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    return TextConfig(text=f"{folder}/*", tokenizer=str(tmp_path / "tokenizer.json"), seq_len=8, heldout=0.2)


def _show(what: str, fraction: float | None, count: int, seconds: float) -> None:
    assert fraction is not None and 0 <= fraction <= 1


def test_training_reads_what_was_prepared(
    config: TextConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", f"--data.text={config.text}", f"--data.tokenizer={config.tokenizer}"]) == 0
    assert "tokens to train on" in capsys.readouterr().out
    monkeypatch.setattr(encode.TokenizerEncoder, "_encode_batch", pytest.fail)
    open_corpus(TextConfig(text=config.text, tokenizer=config.tokenizer, seq_len=8))


@pytest.mark.parametrize("at", [1, 20, -2])
def test_a_kill_costs_no_tokens_that_were_written(
    config: TextConfig, at: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "_SAVE_S", -1.0)
    calls, encoded = [0], list[int]()
    encode_batch = encode.TokenizerEncoder._encode_batch

    def counted(self: encode.TokenizerEncoder, batch: list[str | None]) -> list[encode.Ids]:
        encoded.append(sum(map(len, filter(None, batch))))
        return encode_batch(self, batch)

    monkeypatch.setattr(encode.TokenizerEncoder, "_encode_batch", counted)

    def show(*_: object) -> None:
        calls[0] += 1

    (_, whole), *_ = prepare_corpus(config, None, show)
    ids, every, total = np.array(whole.map()), calls[0], sum(encoded)
    for path in cache.iterdir():
        path.rename(cache.parent / path.name)
    encoded.clear()
    calls[0] = 0

    def kill(*_: object) -> None:
        calls[0] += 1
        if calls[0] == at % every:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(config, None, kill)
    (_, again), *_ = prepare_corpus(config, None, _show)
    assert (again.map() == ids).all() and again.digest == whole.digest and again.train == whole.train
    assert total <= sum(encoded) <= total + 3 * 1000  # and the batches that were under way
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [Path(again.path).parent.name]
