"""Text that is tokenized while it is read: the same samples on any number of ranks, from any place, in little space."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task import streamed_text
from hvdtrain.task.corpus import open_corpus, prepare_corpus
from hvdtrain.task.encode import ByteEncoder, Document, Ids
from hvdtrain.task.streamed_text import StreamedText, StreamedWindows
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.text_sources import Documents
from hvdtrain.verify.data import verify_data
from tests.support.gallery import Recorded, record_on_threads
from tests.task.test_formats import COMPRESSIONS, TEXTS, WRITERS, rows_of

L = 8  # ids of a sample


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small units and blocks, and a cache of their own."""
    monkeypatch.setattr(streamed_text, "UNIT_BYTES", 100)
    monkeypatch.setattr(streamed_text, "_SHUFFLED_TOKENS", 20 * L)
    monkeypatch.setattr("hvdtrain.task.corpus.UNIT_BYTES", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hvdtrain/streamed"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the documents that are tokenized."""
    names: list[str] = []
    encode = ByteEncoder.encode

    def noting(self: ByteEncoder, documents: Iterator[Document]) -> Iterator[Ids]:
        def noted() -> Iterator[Document]:
            for document in documents:
                names.append(document.name)
                yield document

        return encode(self, noted())

    monkeypatch.setattr(ByteEncoder, "encode", noting)
    return names


def files(folder: Path, ending: str = ".jsonl", number: int = 3) -> list[list[str]]:
    """Write files, and return the documents of each."""
    folder.mkdir()
    kind, _, compression = ending[1:].partition(".")
    parts = [TEXTS[each::number] for each in range(number)] if kind != "txt" else [[text] for text in TEXTS[:12]]
    for each, texts in enumerate(parts):
        content = texts[0].encode() if kind == "txt" else WRITERS[kind](rows_of(texts))
        (folder / f"{each}{ending}").write_bytes(COMPRESSIONS[f".{compression}" if compression else ""](content))
    return parts


def stream(folder: Path, **options: Any) -> StreamedText:
    corpus = open_corpus(TextConfig(text=f"{folder}/*", seq_len=L, streaming=True, **options))
    assert isinstance(corpus.train, StreamedText)
    return corpus.train


def tokens(text: StreamedText, parts: list[list[str]], passes: int, seed: int = 3) -> list[int]:
    """The tokens of some passes, from the documents themselves."""
    orders = [[int(file.name.split(".")[0]) for file in text.files(seed, epoch)] for epoch in range(passes)]
    documents = [document for order in orders for number in order for document in parts[number]]
    assert all(sorted(order) == list(range(len(parts))) for order in orders)
    return [id_ for document in documents for id_ in [*document.encode(), 256]]


def samples(windows: StreamedWindows, begin: int, end: int) -> list[tuple[int, ...]]:
    return [tuple(windows[position].tolist()) for position in range(begin, end)]


def stop(*windows: StreamedWindows) -> None:
    """Let them read no further ahead."""
    for each in windows:
        assert each._reader is not None
        each._reader.shutdown()


def blocks(ids: list[int], count: int) -> list[set[tuple[int, ...]]]:
    """The samples of each block of 20, without their order."""
    rows = [tuple(ids[i * L : (i + 1) * L + 1]) for i in range(20 * count)]
    return [set(rows[i : i + 20]) for i in range(0, len(rows), 20)]


ENDINGS = [".jsonl", ".csv", ".parquet", ".txt", ".jsonl.gz", ".jsonl.zst", ".csv.gz"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_samples_are_those_of_the_documents_pass_after_pass(tmp_path: Path, ending: str) -> None:
    """Each block has the windows of its tokens, in an order of its own."""
    parts = files(tmp_path / "in", ending)
    text = stream(tmp_path / "in")
    ids = tokens(text, parts, 3)
    count = len(ids) // (20 * L) - 1
    found = samples(text.by_position(3, {}, 8), 0, 20 * count)
    expected = blocks(ids, count)
    assert [set(found[i : i + 20]) for i in range(0, len(found), 20)] == expected
    assert count > 5 and found[:20] != [tuple(ids[i * L : (i + 1) * L + 1]) for i in range(20)]


def test_loader_processes_read_the_same(tmp_path: Path) -> None:
    """The field is guessed, and what read it is closed."""
    files(tmp_path / "in")
    windows = stream(tmp_path / "in").by_position(3, {}, 8)
    copied: StreamedWindows = pickle.loads(pickle.dumps(windows))
    assert samples(copied, 0, 30) == samples(windows, 0, 30)


def test_another_seed_or_pass_is_another_order(tmp_path: Path) -> None:
    files(tmp_path / "in", number=8)
    text = stream(tmp_path / "in")
    assert text.files(3, 0) != text.files(3, 1) != text.files(4, 1)
    assert samples(text.by_position(3, {}, 8), 0, 20) != samples(text.by_position(4, {}, 8), 0, 20)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.some(4)
def test_reading_continues_at_a_place(tmp_path: Path, ending: str, cache: Path, encoded: list[str]) -> None:
    """On another host, too: only what follows is tokenized."""
    files(tmp_path / "in", ending)
    text = stream(tmp_path / "in")
    windows = text.by_position(3, {}, 8)
    expected = samples(windows, 0, 240)
    stop(windows)
    for position in (0, 19, 45, 120, 239):
        one = text.by_position(3, {}, 8)
        one[position]
        one.note_place()
        stop(one)
        shutil.rmtree(cache)
        encoded.clear()
        other = text.by_position(3, json.loads(one.state()), 8)
        assert samples(other, position, 240) == expected[position:]
        stop(other)
        begun, (place, *_) = position // 20 * 20 * L, json.loads(one.state())["place"]
        assert place <= begun < place + 500
    assert len(encoded) < 20  # for the last sample alone: those of its block and the next


def test_ranks_of_a_host_tokenize_each_document_once(tmp_path: Path, encoded: list[str]) -> None:
    files(tmp_path / "in")
    text = stream(tmp_path / "in")
    ranks = [text.by_position(3, {}, 8) for _ in range(3)]
    found = [samples(ranks[i % 3], i, i + 1)[0] for i in range(60)]
    stop(*ranks)
    assert len(encoded) == len(set(encoded)) > 10
    assert found == samples(text.by_position(3, {}, 8), 0, 60)


def test_the_disk_holds_a_few_blocks(tmp_path: Path, cache: Path) -> None:
    """A rank that is far behind, or goes back, tokenizes again."""
    files(tmp_path / "in")
    text = stream(tmp_path / "in")
    windows = text.by_position(3, {}, 8)
    expected = samples(windows, 0, 20)
    most = 0
    for block in range(30):
        windows[20 * block]
        most = max(most, sum(map(held, cache.glob("*/about.json"))))
    assert most <= 8 * 20 * L + 2 * 200
    assert samples(windows, 0, 20) == expected


def test_the_block_before_is_not_looked_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that a rank repeats may be in it."""
    files(tmp_path / "in")
    keys: list[str] = []
    find = streamed_text.once_per_host

    def noting(name: str, key: str, *more: Any) -> Path:
        keys.append(key)
        return find(name, key, *more)

    monkeypatch.setattr(streamed_text, "once_per_host", noting)
    windows = stream(tmp_path / "in").by_position(3, {}, 8)
    for position in (0, 45, 39, 40, 20, 60):
        windows[position]
    stop(windows)
    assert len(keys) == len(set(keys)) > 6


def held(about: Path) -> int:
    """The tokens of a unit, if it is whole, and not just removed."""
    try:
        return 0 if ".tmp-" in about.parent.name else int(json.loads(about.read_text())["train"])
    except OSError:
        return 0


def test_a_row_that_cannot_be_read_is_an_error_where_it_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    good = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(200))
    (tmp_path / "in/a.jsonl").write_text(good + '{"text": 5}\n' + good)
    windows = stream(tmp_path / "in").by_position(3, {}, 8)
    assert len(samples(windows, 0, 20)) == 20
    with pytest.raises(DataError, match=r"a\.jsonl, line (201|\d+ after byte [\d,]+) has no text"):
        samples(windows, 0, 400)
    windows.note_place()
    with pytest.raises(DataError, match=r"a\.jsonl, line \d+ after byte [\d,]+ has no text"):
        samples(stream(tmp_path / "in").by_position(3, json.loads(windows.state()), 8), 300, 400)
    assert len(samples(stream(tmp_path / "in", on_error="skip").by_position(3, {}, 8), 0, 4000)) == 4000
    assert "left out: 1 " in caplog.messages[0] and "a.jsonl, line 201)" in caplog.messages[0]
    assert len(caplog.messages) == 1, "each pass leaves out the same row"


@pytest.mark.parametrize("change", ["seed", "seq_len", "text"])
def test_other_text_begins_where_it_is_resumed(tmp_path: Path, change: str, encoded: list[str]) -> None:
    """A place is one of the text, seed and length of samples that it was noted for."""
    files(tmp_path / "in")
    windows = stream(tmp_path / "in").by_position(3, {}, 8)
    windows[199]
    windows.note_place()
    stop(windows)
    if change == "text":
        (tmp_path / "in/1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[::-1]))
    other = open_corpus(
        TextConfig(text=f"{tmp_path}/in/*", seq_len=5 if change == "seq_len" else L, streaming=True)
    ).train.by_position(4 if change == "seed" else 3, json.loads(windows.state()), 8)
    encoded.clear()
    found = {id_ for position in range(190, 230) for id_ in other[position].tolist()}
    stop(other)
    assert found <= {*b"".join(text.encode() for text in TEXTS), 256}
    assert len(encoded) < 40 and encoded[0].endswith(", line 1")
    other.note_place()
    assert json.loads(other.state())["of"] != json.loads(windows.state())["of"]
    of_another_kind = {"epoch": 6, "begin": 66, "position": 68}  # an iterable data set's
    assert other._text.by_position(4, of_another_kind, 8)._start.tokens == 0


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    files(tmp_path / "in")
    windows = stream(tmp_path / "in").by_position(3, {}, 8)
    windows[0]
    for file in (tmp_path / "in").iterdir():
        file.write_text('{"text": "shorter"}\n')
    with pytest.raises(DataError, match=r"\.jsonl has changed while it was trained on"):
        samples(windows, 0, 400)


def test_documents_without_tokens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": ""}\n' * 300)
    text = stream(tmp_path / "in")
    silent = replace(text, encoder=Silent())
    with pytest.raises(DataError, match="the text is empty"):
        silent.by_position(3, {}, 8)[0]


class Silent(ByteEncoder):
    """As a tokenizer that knows no end of a document."""

    def encode(self, documents: Iterator[Document]) -> Iterator[Ids]:
        return (piece for document in documents for text in document.pieces if len(piece := np.frombuffer(text, "u1")))


def test_files_without_a_document_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n\n")
    documents = Documents(open_corpus(TextConfig(text=__file__)).train and [], "text", 0.0, _skipped())
    with pytest.raises(DataError, match="the text is empty"):
        StreamedText(documents, ByteEncoder(), L, "", "").by_position(3, {}, 8)[0]


def _skipped() -> Any:
    from hvdtrain.task.formats import Skipped

    return Skipped(True)


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path / "in")
    files(tmp_path / "other")
    (tmp_path / "valid.jsonl").write_text(json.dumps({"text": "held out " * 9}) + "\n")
    corpora = [
        open_corpus(TextConfig(text=f"{tmp_path}/{name}/*", seq_len=L, streaming=True, validation=validation))
        for name, validation in (("in", None), ("other", str(tmp_path / "valid.jsonl")))
    ]
    assert corpora[0].heldout is None and len(corpora[1].heldout) > 5
    assert corpora[0].digest == corpora[1].digest and corpora[0].vocabulary == 257
    assert corpora[0].note == "3 files, tokenized while they are read, by field 'text'"
    text = f"{tmp_path}/in/*"
    assert open_corpus(TextConfig(text=text, heldout=0.0, streaming=True)).heldout is None
    for wrong in ({"tokens": "a.npy"}, {"text": text, "weights": [1.0]}, {"text": text, "heldout": 0.1}, {}):
        with pytest.raises(ConfigError, match=r"data\.streaming streams text"):
            open_corpus(TextConfig(**wrong, streaming=True))
    monkeypatch.setattr("hvdtrain.task.corpus.UNIT_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=r"not for this text.*\n.*\n.* bytes"):
        open_corpus(TextConfig(text=text, streaming=True))
    monkeypatch.setattr("hvdtrain.task.corpus.UNIT_BYTES", 0)
    monkeypatch.setattr("hvdtrain.task.corpus.LARGEST", 10)
    with pytest.raises(ConfigError, match=r"not for this text.*\n.*\n.*__init__\.py\n.*jsonl"):
        open_corpus(TextConfig(text=streamed_text.__file__.replace("streamed_text", "__init__"), streaming=True))
    with pytest.raises(ConfigError, match="nothing to prepare"):
        prepare_corpus(TextConfig(text=text, streaming=True), None, None)


OPTIONS = (
    "--data.streaming=true",
    f"--data.seq_len={L}",
    "--model.preset=tiny",
    "--train.steps=12",
    "--train.global_batch=8",
    "--train.micro_batch=2",
    "--checkpoint.every=5",
)


def test_laws_1_and_2(tmp_path: Path, cache: Path) -> None:
    """The losses are equal on 1, 2 and 3 ranks, and after a resume on another number of ranks and without the cache."""
    files(tmp_path / "in")
    options = [f"--data.text={tmp_path}/in/*", *OPTIONS]
    one, *others = (record_on_threads(tmp_path / str(n), *options, size=n) for n in (1, 2, 3))
    resumed: Recorded | None = None
    for size, stop in ((2, 7), (3, 12)):
        resumed = record_on_threads(tmp_path, *options, f"--train.stop_at={stop}", size=size)
        shutil.rmtree(cache)
    assert resumed is not None and len(one.losses()) == 12
    for job in (*others, resumed):
        assert job.losses() == pytest.approx(one.losses(), rel=1e-5)
    report = verify_data(resumed.run)
    assert not report.wrong and report.epochs.iterable == 96
