"""Documents in rows of files: the same in every format, compression and store; rows and files that are wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.errors import ConfigError, DataError, TransientDataError
from hvdtrain.task import formats
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.source_files import files_matching
from hvdtrain.task.text_config import TextConfig
from tests.support.gallery import Recorded, record_on_threads

pyarrow = pytest.importorskip("pyarrow", reason="the pyarrow library is not installed")
fsspec = pytest.importorskip("fsspec", reason="the fsspec library is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f'document {i} "says",\nnäïve 東京 ' + "word " * (i % 7) for i in range(60)]


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n\n" for row in rows).encode()  # blank lines are no rows


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + file.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=25)
    return bytes(sink.getvalue())


def as_zstandard(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


WRITERS: dict[str, Callable[[Any], bytes]] = {
    "jsonl": as_lines,
    "ndjson": as_lines,
    "csv": as_csv,
    "parquet": as_parquet,
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": as_zstandard}


def rows_of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"id": i, "text": text, "note": "more text"} for i, text in enumerate(texts)]


def ids(windows: Any) -> list[int]:
    return [int(each) for each in windows.ids()]


def plain(texts: list[str]) -> list[int]:
    return [id_ for text in texts for id_ in [*text.encode(), 256]]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ending", WRITERS)
def test_rows_are_the_documents_of_plain_files(tmp_path: Path, ending: str, compression: str) -> None:
    (tmp_path / "2.txt").write_text(TEXTS[-1])
    for number, part in enumerate((TEXTS[:40], TEXTS[40:-1])):
        content = COMPRESSIONS[compression](WRITERS[ending](rows_of(part)))
        (tmp_path / f"{number}.{ending.upper()}{compression}").write_bytes(content)
    corpus = open_corpus(TextConfig(text=f"{tmp_path}/*", seq_len=16, heldout=0.1))
    held = TEXTS[9::10]
    assert ids(corpus.train) == plain([text for text in TEXTS if text not in held])
    assert ids(corpus.heldout) == plain(held)
    assert corpus.note == "3 files: 60 documents, by field 'text' (guessed, see --data.field)"


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "jsonl.gz"])
def test_a_link_has_the_format_of_its_own_name(tmp_path: Path, ending: str) -> None:
    """As in the cache of the Hugging Face Hub, where the linked file has a hash as its name."""
    name, _, compression = ending.partition(".")
    content = WRITERS[name](rows_of(TEXTS))
    (tmp_path / "abc123").write_bytes(gzip.compress(content) if compression else content)
    (tmp_path / f"a [v2].{ending}").symlink_to("abc123")
    corpus = open_corpus(TextConfig(text=f"{tmp_path}/a [v2].{ending}", seq_len=16, heldout=0))
    assert ids(corpus.train) == plain(TEXTS)


def test_a_field_is_used_where_a_source_has_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(rows_of(TEXTS)))
    (tmp_path / "b.txt").write_text("plain text " * 50)
    names = [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.txt"]
    corpus = open_corpus(TextConfig(text=names, weights=[1.0, 1.0], seq_len=8, field="text"))
    assert "60 documents, by field 'text'" in corpus.note


def _train(folder: Path, *options: str, size: int) -> Recorded:
    common = ("--model.preset=tiny", "--train.steps=3", "--train.global_batch=4", "--data.seq_len=32")
    return record_on_threads(folder, *common, "--train.micro_batch=2", "--train.eval_every=1", *options, size=size)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a server that sends no parts of files."""
    (tmp_path / "www").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "www")))
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("store", ["memory", "file", "http"])
@pytest.mark.parametrize("name", ["{}.jsonl", "{}.parquet", "{}.csv.zst", "{}.txt.gz"])
@pytest.mark.some(4)
def test_a_store_has_the_same_documents_and_what_changes_there_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: str, store: str, name: str
) -> None:
    base = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/www", "http": served}[store]
    _, ending, *compression = name.split(".")

    def put(texts: list[str], at_s: int) -> None:
        for number, part in enumerate((texts[:30], texts[30:])):
            content = "".join(part).encode() if ending == "txt" else WRITERS[ending](rows_of(part))
            content = COMPRESSIONS["".join(f".{each}" for each in compression)](content)
            if store == "memory":
                fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{name.format(number)}", content)
            else:
                (tmp_path / "www" / name.format(number)).write_bytes(content)
                os.utime(tmp_path / "www" / name.format(number), (at_s, at_s))

    monkeypatch.setattr(fsspec.filesystem("http"), "block_size", 64)
    put(TEXTS, 10**9)
    config = TextConfig(text=f"{base}/{name.format('*')}", seq_len=16, heldout=0)
    first = open_corpus(config)
    assert ids(first.train) == plain(["".join(TEXTS[:30]), "".join(TEXTS[30:])] if ending == "txt" else TEXTS)
    assert open_corpus(config).train.file == first.train.file
    put([text.replace("word", "drow") for text in TEXTS], 10**9 + 1)  # as many bytes
    assert ids(open_corpus(config).train) != ids(first.train)
    assert [file.name for file in files_matching([str(config.text)])] == [name.format(0), name.format(1)]


ROWS = [{"text": "a" * 50}, {"text": None}, {"body": "x", "n": 1}, {"text": 3}, {"text": ["b"]}, [1]]


@pytest.mark.parametrize(
    ("name", "content", "line", "found", "note"),
    [
        ("a.jsonl", as_lines(ROWS[:2]), "line 3", "null", "1 null"),
        ("a.jsonl", as_lines([ROWS[0], *ROWS[2:]]), "line 3", "the fields body, n", "2 without the field"),
        ("a.jsonl", as_lines([ROWS[0], *ROWS[3:5]]), "line 3", "a value of type int", "2 not text"),
        ("a.jsonl", as_lines([ROWS[0], *ROWS[5:]]), "line 3", "no fields", "1 without the field"),
        ("a.jsonl", as_lines(ROWS[:1]) + b'{"text": "b\xff"}', "line 3", "not JSON: ", "1 broken"),
        ("a.jsonl", as_lines(ROWS[:1]) + b'{"text": NaN}\n{', "line 3", "not JSON: ", "2 broken"),
        ("a.jsonl", as_lines([ROWS[0], {"text": "c" * 200}]), "line 3", "a line of more than 100 bytes", "1 broken"),
        ("a.csv", as_csv(ROWS[:1]) + b'"a\nb"\n1,2\n', "line 5", "2 fields, but 1 names", "1 broken"),
        ("a.csv", as_csv(ROWS[:1]) + b'"a"b\nc\n', "line 3", "not CSV: ", "1 broken"),
        ("a.csv", as_csv(ROWS[:1]) + b"\xff\nc\n", "line 3", "not UTF-8", "1 broken"),
        ("a.csv", as_csv(ROWS[:1]) + b'c\n"ab', "line 4", "not CSV: unexpected end", "1 broken"),
        ("a.parquet", as_parquet(ROWS[:2]), "row 2", "null", "1 null"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_without_a_text_are_refused_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, line: str, found: str, note: str
) -> None:
    monkeypatch.setattr(formats, "_LONGEST_BYTES", 100)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}, {line} has no text") as caught:
        open_corpus(TextConfig(text=str(path), seq_len=8, heldout=0))
    assert found in str(caught.value.found) and "--data.on_error skip" in str(caught.value.next_step)
    left = open_corpus(TextConfig(text=str(path), seq_len=8, on_error="skip"))
    assert f"; left out: {note} (first: {path}, {line})" in left.note
    assert ids(left.train)[:51] == plain(["a" * 50])


PARQUET = as_parquet(rows_of(TEXTS))


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.zst", "b.csv.gz"])
def test_an_empty_file_has_no_documents(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(PARQUET)
    (tmp_path / name).touch()
    assert ids(open_corpus(TextConfig(text=f"{tmp_path}/*", seq_len=16, heldout=0)).train) == plain(TEXTS)


@pytest.mark.parametrize(
    ("files", "options", "error", "words"),
    [
        ({"a.jsonl": as_lines([{"id": i} for i in range(9)])}, {}, DataError, "is unknown in.*fields id.*--data.field"),
        ({"a.jsonl": as_lines([{"x": "a", "y": "b"}])}, {}, DataError, "is unknown in.*fields x, y"),
        ({"a.csv": b"text\n"}, {}, DataError, "is unknown in.*no row with fields"),
        ({"a.jsonl": b"{\n}\n"}, {}, DataError, "is unknown in.*line 1.*not JSON"),
        ({"a.parquet": PARQUET}, {"field": "id"}, DataError, "row 1 has no text.*type int"),
        ({"a.parquet": PARQUET}, {"field": "id", "on_error": "skip"}, DataError, "empty.*60 not text"),
        ({"a.parquet": PARQUET, "b.parquet": as_parquet([{"body": "x"}])}, {}, DataError, "b.parquet, row 1.*body"),
        (
            {"a.parquet": as_parquet([{"meta": {"text": "a"}}])},
            {"field": "meta.no"},
            DataError,
            "row 1 has no text.*the fields meta",
        ),
        ({"a.csv": b"text,id,text\na,1,b\n"}, {}, DataError, "more than one field 'text'"),
        ({"a.csv": b"text\n" + b"a" * 200}, {"on_error": "skip"}, DataError, "line 2 cannot be read.*of more than 100"),
        (
            {"a.csv": b'text\n"a\nb\nc\n'},
            {"on_error": "skip"},
            DataError,
            "line 2 cannot be read.*a quote that nothing closes",
        ),
        ({"a.parquet": PARQUET[:-9]}, {}, DataError, "cannot read the file.*magic bytes"),
        ({"a.parquet": PARQUET[:-1] + b"E"}, {}, DataError, "cannot read the file.*encrypted.*not encrypted"),
        ({"a.jsonl.gz": gzip.compress(as_lines(ROWS[:1]))[:-9]}, {}, DataError, "cannot read the file.*EOFError"),
        ({"a.jsonl.gz": b"not compressed"}, {}, DataError, "cannot read the file.*Not a gzipped file"),
        ({"a.csv.zst": as_zstandard(b"text\na\n")[:-3]}, {}, DataError, "cannot read the file.*Truncated"),
        ({"a.txt": b"text " * 50}, {"field": "text"}, ConfigError, "data.field text has no effect.*a.txt"),
        ({"a.jsonl": as_lines(ROWS[:1] * 9)}, {"tokens": "x", "text": None, "field": "y"}, ConfigError, "no effect"),
        ({"a.jsonl": b"{}"}, {"text": None, "field": "y"}, ConfigError, "no effect.*no data.text"),
        ({"a.jsonl": b"{}"}, {"validation": "v", "heldout": 0.1}, ConfigError, "data.validation and data.heldout"),
        ({"a.jsonl": b"{}"}, {"validation": "v", "weights": [1.0]}, ConfigError, "data.validation and data.weights"),
        ({"a.txt": b"text " * 50}, {"validation": "/none/*"}, DataError, "'/none/.'.*correct --data.validation"),
        ({"a.txt": b"text " * 50, "v": b"text"}, {"validation": "v"}, DataError, "too few tokens in v"),
    ],
)
def test_bad_files_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], options: Any, error: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "_LONGEST_BYTES", 100)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=f"(?s){words}"):
        open_corpus(TextConfig(**{"text": "a.*" if len(files) == 1 else "[ab].*", "seq_len": 8, **options}))


@pytest.mark.parametrize(
    ("url", "method", "raised", "error", "found"),
    [
        ("unheardof://b/x.jsonl", "", None, ConfigError, "Protocol not known: unheardof"),
        ("memory://b/none.jsonl", "", None, DataError, "none.jsonl"),
        ("memory://b/none*.jsonl", "", None, DataError, "nothing"),
        ("memory://b/*.jsonl", "glob", PermissionError(13, "Access Denied"), DataError, "Access Denied"),
        ("memory://b/a.jsonl", "open", PermissionError("Forbidden"), DataError, "PermissionError: Forbidden"),
        ("memory://b/a.jsonl", "open", TimeoutError("read"), TransientDataError, "TimeoutError: read"),
    ],
)
def test_stores_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, url: str, method: str, raised: Any, error: Any, found: str
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise raised

    memory = fsspec.filesystem("memory")
    memory.pipe("/b/a.jsonl", as_lines(rows_of(TEXTS)))
    if method:
        monkeypatch.setattr(type(memory), method, fail)
    with pytest.raises(error) as caught:
        open_corpus(TextConfig(text=url, seq_len=8))
    assert type(caught.value) is error and found in str(caught.value.found) and "--data.text" in str(caught.value)


@pytest.mark.parametrize("kind", ["text", "tokens", "dataset", "chat"])
def test_validation_is_whole_and_of_the_same_kind(tmp_path: Path, kind: str) -> None:
    for name, count in (("a", 60), ("b", 30)):
        if kind == "tokens":
            np.save(tmp_path / name, np.arange(10 * count) % 250)
            (tmp_path / f"{name}.npy").rename(tmp_path / name)
        elif kind == "dataset":
            datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")
            datasets.Dataset.from_dict({"text": TEXTS[:count]}).save_to_disk(str(tmp_path / name))
        else:
            rows = [{"prompt": text, "completion": text} for text in TEXTS[:count]] if kind == "chat" else TEXTS
            content = "".join(TEXTS[:count]).encode() if kind == "text" else as_lines(rows)
            (tmp_path / name).write_bytes(content)
    data: dict[str, Any] = {kind: str(tmp_path / "a"), "seq_len": 200}
    corpus = open_corpus(TextConfig(**data, validation=str(tmp_path / "b")))
    first, second = (open_corpus(TextConfig(**{**data, kind: str(tmp_path / name)}, heldout=0)) for name in "ab")
    assert (ids(corpus.train), ids(corpus.heldout)) == (ids(first.train), ids(second.train))
    assert corpus.digest not in (first.digest, second.digest)


def test_validation_that_is_trained_on_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(as_lines(rows_of(TEXTS)))
    for pattern, reported in (("b*", False), ("*", True)):
        open_corpus(TextConfig(text=f"{tmp_path}/a*", validation=f"{tmp_path}/{pattern}", seq_len=8))
        assert ("a.jsonl" in caplog.text and "is trained on, too" in caplog.text) == reported
