"""Tokenizer files for transformers: they give the ids that training had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.encode import (
    SEPARATOR,
    SETTINGS,
    TOKENIZER,
    ByteEncoder,
    Document,
    TokenizerEncoder,
    is_byte_tokenizer,
)
from hvdtrain.task.text_config import TextConfig

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")


def _write(folder: Path, files: dict[str, bytes]) -> Any:
    """Write the files next to a model's config, and return what transformers reads there."""
    folder.mkdir(exist_ok=True)
    for name, content in {**files, "config.json": b'{"model_type": "deepseek_v3"}'}.items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _write(tmp_path_factory.mktemp("bytes"), ByteEncoder().files())


def test_every_byte_is_the_token_of_its_value(of_bytes: Any) -> None:
    text = "".join(map(chr, (*range(0x800), 0x20AC, 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF)))  # each byte that UTF-8 has
    assert of_bytes(text).input_ids == list(text.encode())
    assert [of_bytes.decode([byte]) for byte in range(256)] == [
        bytes([byte]).decode("utf-8", "replace") for byte in range(256)
    ]
    assert len(of_bytes) == ByteEncoder().vocabulary() and of_bytes.eos_token_id == SEPARATOR


@given(st.text())
@example("a<|endoftext|>b")
def test_text_becomes_the_ids_of_training(of_bytes: Any, text: str) -> None:
    (*pieces, _) = ByteEncoder().encode([Document([text.encode()], "text")])
    assert of_bytes(text).input_ids == [int(i) for piece in pieces for i in piece]


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_are_decoded_as_python_does(of_bytes: Any, content: bytes) -> None:
    assert of_bytes.decode([*content, SEPARATOR], skip_special_tokens=True) == content.decode("utf-8", "replace")


def _words(path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    made.save(str(path))


def test_a_tokenizer_without_settings_gets_some(tmp_path: Path) -> None:
    _words(tmp_path / "words.json")
    encoder = TokenizerEncoder(str(tmp_path / "words.json"))
    read = _write(tmp_path / "out", encoder.files())
    (ids, end) = encoder.encode([Document([b"b a c"], "text")])
    assert read("b a c", add_special_tokens=False).input_ids == ids.tolist() == [2, 1, 0]
    assert [read.eos_token_id] == end.tolist()


def test_files_next_to_a_tokenizer_are_kept_and_no_others(tmp_path: Path) -> None:
    _words(tmp_path / TOKENIZER)
    own = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "b"}).encode()
    (tmp_path / SETTINGS).write_bytes(own)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model.safetensors").write_text("weights")
    found = TokenizerEncoder(str(tmp_path / TOKENIZER)).files()
    assert found.keys() == {TOKENIZER, SETTINGS, "chat_template.jinja"}
    assert found[SETTINGS] == own and found[TOKENIZER] == (tmp_path / TOKENIZER).read_bytes()


def test_the_byte_tokenizer_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(ByteEncoder().files()[TOKENIZER])
    _words(tmp_path / "words.json")
    (tmp_path / "text.json").write_text("{")
    assert [is_byte_tokenizer(tmp_path / f"{name}.json") for name in ("bytes", "words", "text")] == [True, False, False]


def test_ids_of_an_unknown_tokenizer_get_no_files(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "t.npy", np.arange(100) % 7)
    _words(tmp_path / TOKENIZER)
    data = TextConfig(tokens=str(tmp_path / "t.npy"), seq_len=4)
    assert open_corpus(data).tokenizer == {}
    assert open_corpus(data, str(tmp_path / TOKENIZER)).tokenizer.keys() == {TOKENIZER, SETTINGS}
