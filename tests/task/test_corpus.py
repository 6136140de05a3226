"""The data of each source, and the errors of bad data."""

import codecs
import gzip
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.mixture import sample_order
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task import text_sources
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.encode import SEPARATOR
from hvdtrain.task.source_files import files_matching
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.text_sources import standard_library


def ids(windows):
    return windows.file.map()[windows.start : windows.start + windows.count].tolist()


def documents(windows):
    found, current = [], []
    for token in ids(windows):
        if token == SEPARATOR:
            found.append(bytes(current))
            current = []
        else:
            current.append(token)
    assert not current
    return found


@pytest.fixture
def texts(tmp_path):
    """Files in two folders, each with a content of its own."""
    for index in range(60):
        path = tmp_path / "texts" / ("ab"[index % 2]) / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"document {index}\n".encode() * 30 + bytes([1 + index, 0x80 + index]))
    return tmp_path / "texts"


@pytest.mark.parametrize("heldout", [0, 0.05, 0.3])
def test_each_file_is_in_one_part_whole(texts, heldout):
    """Also one that two patterns match."""
    corpus = open_corpus(TextConfig(text=[f"{texts}/**/*.txt", f"{texts}/a/1*"], seq_len=16, heldout=heldout))
    train, held = documents(corpus.train), documents(corpus.heldout) if corpus.heldout else []
    assert sorted(train + held) == sorted(path.read_bytes() for path in texts.glob("*/*.txt"))
    assert train and bool(held) == bool(heldout)
    assert abs(len(held) / 60 - heldout) < 0.12


def test_the_split_does_not_follow_the_place(texts, tmp_path):
    first = open_corpus(TextConfig(text=f"{texts}/**/*.txt", seq_len=16))
    texts.rename(tmp_path / "elsewhere")
    again = open_corpus(TextConfig(text=f"{tmp_path}/elsewhere/**/*.txt", seq_len=16))
    assert (again.train.file.digest, again.train.count) == (first.train.file.digest, first.train.count)


@pytest.mark.parametrize(
    ("sizes", "heldout", "counts"),
    [
        ((10_000, 600, 10), 0.05, (10_012, 601)),
        ((100, 100), 0.999, (101, 101)),
        ((600, 0, 1000), 0.05, (1002, 601)),
        ((0, 1000), 0.05, (952, 50)),
    ],
)
def test_of_few_files_at_least_one_is_held_out_and_never_all(tmp_path, sizes, heldout, counts):
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    corpus = open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=16, heldout=heldout))
    assert (corpus.train.count, corpus.heldout.count) == counts


def test_of_one_file_the_end_is_held_out(tmp_path):
    text = bytes(byte or 1 for byte in os.urandom(1999))  # without zeros, as text
    (tmp_path / "a").write_bytes(text)
    for heldout, count in ((0.05, 100), (0.5, 1000)):
        corpus = open_corpus(TextConfig(text=str(tmp_path / "a"), seq_len=16, heldout=heldout))
        assert ids(corpus.train) + ids(corpus.heldout) == [*text, SEPARATOR]
        assert corpus.heldout.count == count


def test_changed_files_and_damage_are_read_again(texts):
    config = TextConfig(text=f"{texts}/**/*.txt", seq_len=16)
    first = open_corpus(config)
    os.truncate(first.train.file.path, 100)
    assert open_corpus(config).train.file == first.train.file
    assert first.train.file.map().size == first.train.count + first.heldout.count
    path = texts / "a" / "0.txt"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, 10**18))
    assert open_corpus(config).train.file.digest != first.train.file.digest


def test_the_standard_library_is_the_default():
    files = standard_library()
    names = {file.name for file in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [name for name in names if "site-packages" in name or "test" in Path(name).parts]
    corpus = open_corpus(TextConfig())
    total = corpus.train.count + corpus.heldout.count
    assert total == sum(file.size_bytes + 1 for file in files) > 5e6, "each byte, and a separator"
    assert 0.01 < corpus.heldout.count / total < 0.15
    assert corpus.train.file.vocabulary == 257


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"--data\.text"):
        open_corpus(TextConfig())


@pytest.mark.parametrize("dtype", ["<u2", "<i4", ">i8", "u1"])
def test_tokens_are_used_where_they_stand(tmp_path, cache, dtype):
    tokens = (np.arange(1000) % 200).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    corpus = open_corpus(TextConfig(tokens=str(tmp_path / "tokens.npy"), seq_len=16))
    assert ids(corpus.train) + ids(corpus.heldout) == tokens.tolist()
    assert (corpus.train.count, corpus.heldout.count, corpus.train.file.vocabulary) == (950, 50, 200)
    assert corpus.train[3].tolist() == tokens[48:65].tolist()
    assert not list(cache.glob("*/tokens.bin"))


@pytest.fixture
def three(tmp_path):
    for number, count in enumerate((400, 200, 100)):
        np.save(tmp_path / f"{number}.npy", 1000 * number + np.arange(count))
    return [str(tmp_path / f"{number}.npy") for number in range(3)]


def test_files_without_weights_are_one_after_the_other(three):
    corpus = open_corpus(TextConfig(tokens=three, seq_len=10))
    alone = [open_corpus(TextConfig(tokens=name, seq_len=10)) for name in three]
    for part in ("train", "heldout"):
        wanted = [w.tolist() for one in alone if getattr(one, part) for w in getattr(one, part)]
        found = getattr(corpus, part)
        assert [found[i].tolist() for i in range(len(found))] == wanted
    assert corpus.vocabulary == 2100
    assert len({corpus.digest, open_corpus(TextConfig(tokens=three[::-1], seq_len=10)).digest}) == 2


def test_weights_are_fractions_of_the_samples(three):
    def draw(weights):
        corpus = open_corpus(TextConfig(tokens=three, weights=weights, seq_len=10))
        order = sample_order(corpus.train, len(corpus.train), 0)
        first = [int(corpus.train[i][0]) // 1000 for i in order.indices(np.arange(100))]
        return [first.count(source) for source in range(3)], corpus.digest

    (counts, digest), (other_counts, other_digest) = draw([0.2, 0.3, 0.5]), draw([3, 1, 1])
    assert (counts, other_counts) == ([20, 30, 50], [60, 20, 20])
    assert digest != other_digest


def test_each_pattern_is_a_source_if_there_are_weights(texts):
    patterns = [f"{texts}/a/*.txt", f"{texts}/b/*.txt"]
    corpus = open_corpus(TextConfig(text=patterns, weights=[3, 1], seq_len=16))
    for windows, folder in zip(corpus.train.datasets, "ab", strict=True):
        files = [content.split()[1] for content in documents(windows)]
        assert files and {int(number) % 2 for number in files} == {"ab".index(folder)}
    with pytest.raises(ConfigError, match="in two sources") as caught:
        open_corpus(TextConfig(text=[patterns[0], f"{texts}/*/8.txt"], weights=[3, 1], seq_len=16))
    assert "8.txt" in caught.value.found


def test_a_source_without_a_sample_is_refused(three, tmp_path):
    with pytest.raises(DataError, match=r"too few tokens in .*2\.npy"):
        open_corpus(TextConfig(tokens=three, weights=[1, 1, 1], seq_len=120))
    (tmp_path / "a").write_text("x" * 100)
    with pytest.raises(DataError, match="at least 129") as caught:
        open_corpus(TextConfig(text=str(tmp_path / "a")))
    assert "seq_len" in caught.value.next_step
    assert len(open_corpus(TextConfig(text=str(tmp_path / "a"), seq_len=95)).train) == 1


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: np.save(path, np.ones(100)), "float64"),
        (lambda path: np.save(path, np.ones((10, 10), int)), r"\(10, 10\)"),
        (lambda path: np.save(path, np.zeros(0, int)), "empty"),
        (lambda path: np.save(path, np.array([1, -7] * 50)), "-7"),
        (lambda path: np.save(path, np.array([1, "x"] * 50, object), allow_pickle=True), "Python objects"),
        (lambda path: np.save(path, np.arange(10)), "too few tokens"),
        (lambda path: (np.savez(path, np.arange(9)), path.with_name("t.npy.npz").rename(path)), r"\.npz"),
        (lambda path: path.write_bytes(b""), "no tokens"),
        (lambda path: path.write_bytes(b"not an array"), "no tokens"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "no tokens"),
        (lambda path: (np.save(path, np.arange(1000)), os.truncate(path, 4000)), "no tokens"),
    ],
)
def test_files_that_are_no_tokens(tmp_path, write, message):
    write(tmp_path / "t.npy")
    with pytest.raises(DataError, match=message):
        open_corpus(TextConfig(tokens=str(tmp_path / "t.npy"), seq_len=16))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("Text.\n".encode("utf-16"), "UTF-16, according to"),
        (codecs.BOM_UTF16_BE + "文字\n".encode("utf-16-be"), "UTF-16, according to"),
        ("Text.\n".encode("utf-32"), "UTF-32, according to"),
        ("Text.\n".encode("utf-16-le"), "a zero byte at 1:"),
        (b"It looks well.\n" * 100 + b"\x7fELF\0", "a zero byte at 1504:"),
        (gzip.compress(b"Text.\n"), "gzip, according to"),
        (b"PAR1\x15\0", "Parquet, according to"),
    ],
    ids=["UTF-16", "UTF-16BE", "UTF-32", "UTF-16 without mark", "binary", "gzip", "Parquet"],
)
@pytest.mark.parametrize("piece_bytes", [8, 1 << 20])
def test_what_is_no_text_is_refused(tmp_path, monkeypatch, content, found, piece_bytes):
    monkeypatch.setattr(text_sources, "_PIECE_BYTES", piece_bytes)
    (tmp_path / "good.txt").write_bytes(codecs.BOM_UTF8 + "Größe.\n".encode() * 100)
    assert len(open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=8)).train)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.txt is not text") as caught:
        open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=8))
    way = {"gzip": "gunzip", "Parquet": "end its name in .parquet"}.get(found.partition(",")[0], "iconv")
    assert caught.value.found.startswith(found) and way in caught.value.next_step


def test_no_pickle_is_ever_loaded(tmp_path):
    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return (marker.touch, ())

    np.save(tmp_path / "t.npy", np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(DataError):
        open_corpus(TextConfig(tokens=str(tmp_path / "t.npy")))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"text": "/nowhere/*.txt"}, DataError, "no file matches"),
        ({"text": ["/nowhere", "/nor here"]}, DataError, "'/nowhere'"),
        ({"text": "empty.*"}, DataError, "empty"),
        ({"tokens": "/nowhere.npy"}, DataError, "No such file"),
        ({"dataset": "/nowhere"}, DataError, "no dataset in"),
        ({"tokenizer": "/nowhere.json"}, DataError, "No such file"),
        ({"text": "a", "weights": [0.5, 0.5]}, DataError, "weights"),
        ({"text": "a", "tokens": "b"}, ConfigError, r"data\.text and data\.tokens"),
        ({"text": "a", "tokens": "b", "dataset": "c"}, ConfigError, r"data\.dataset"),
        ({"tokens": "a", "tokenizer": "b"}, ConfigError, "data.tokens and data.tokenizer conflict"),
        ({"seq_len": 0}, ConfigError, r"data\.seq_len"),
        ({"heldout": 1.0}, ConfigError, r"data\.heldout"),
        ({"heldout": -0.1}, ConfigError, r"data\.heldout"),
    ],
)
def test_options_that_are_wrong(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty.1", "empty.2"):
        Path(name).touch()
    with pytest.raises(error, match=f"(?s){message}"):
        open_corpus(TextConfig(**options))


@pytest.mark.parametrize("kind", ["text", "tokens", "dataset", "chat"])
def test_a_name_of_the_hub_is_answered_with_a_download(kind):
    for name, on_hub in (("org/some-data_1.5", True), ("folder/text.txt", False), ("org/data/more", False)):
        with pytest.raises(DataError) as caught:
            open_corpus(TextConfig(**{kind: name}))
        wanted = f"hf download {name} --repo-type dataset" if on_hub else f"correct --data.{kind}"
        assert wanted in caught.value.next_step


def test_too_few_held_out_tokens_are_reported(tmp_path, caplog):
    (tmp_path / "a").write_text("x" * 500)
    assert open_corpus(TextConfig(text=str(tmp_path / "a"), seq_len=64)).heldout is None
    assert "no evaluation" in caplog.text


def test_a_file_that_cannot_be_read_is_named(texts, monkeypatch):
    def denied(path, mode):
        raise PermissionError(13, "Permission denied")

    (file,) = files_matching([f"{texts}/a/0.txt"])
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(DataError, match=r"0\.txt") as caught:
        list(text_sources._pieces(file))
    assert caught.value.found == "Permission denied"
