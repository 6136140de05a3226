"""The data of each source, and the errors of bad data."""

import codecs
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.mixture import sample_order
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task import text_sources
from hvdtrain.task.corpus import TextConfig, open_corpus
from hvdtrain.task.encode import SEPARATOR
from hvdtrain.task.text_sources import files_matching, standard_library


def ids(windows):
    """All ids of the file's part that the windows cut."""
    return windows.file.map()[windows.start : windows.start + windows.count].tolist()


def documents(windows):
    """The documents that were joined, as bytes."""
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


def contents(files):
    return sorted(Path(file.path).read_bytes() for file in files)


@pytest.mark.parametrize("heldout", [0.05, 0.3])
def test_each_file_is_in_one_part_whole(texts, heldout):
    corpus = open_corpus(TextConfig(text=f"{texts}/**/*.txt", seq_len=16, heldout=heldout))
    train, held = documents(corpus.train), documents(corpus.heldout)
    assert sorted(train + held) == contents(files_matching([f"{texts}/**/*.txt"]))
    assert not set(train) & set(held)
    assert train
    assert abs(len(held) / 60 - heldout) < 0.12


def test_the_split_does_not_follow_the_place(texts, tmp_path):
    first = open_corpus(TextConfig(text=f"{texts}/**/*.txt", seq_len=16))
    texts.rename(tmp_path / "elsewhere")
    again = open_corpus(TextConfig(text=f"{tmp_path}/elsewhere/**/*.txt", seq_len=16))
    assert (again.train.file.digest, again.train.count) == (first.train.file.digest, first.train.count)


def test_of_few_files_one_is_held_out(tmp_path):
    for name, size in (("large", 10_000), ("small", 600), ("smallest", 10)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    corpus = open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=16))
    assert (corpus.train.count, corpus.heldout.count) == (10_012, 601)


def test_not_all_files_are_held_out(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    corpus = open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=16, heldout=0.999))
    assert corpus.train.count == corpus.heldout.count == 101


def test_of_one_file_the_end_is_held_out(tmp_path):
    text = bytes(byte or 1 for byte in os.urandom(1999))  # without zeros, as text
    (tmp_path / "a").write_bytes(text)
    corpus = open_corpus(TextConfig(text=str(tmp_path / "a"), seq_len=16))
    assert ids(corpus.train) + ids(corpus.heldout) == [*text, SEPARATOR]
    assert corpus.heldout.count == 100


def test_nothing_held_out_where_nothing_is_asked_for(texts):
    corpus = open_corpus(TextConfig(text=f"{texts}/**/*.txt", seq_len=16, heldout=0))
    assert corpus.heldout is None
    assert len(documents(corpus.train)) == 60


def test_several_patterns_count_a_file_once(texts):
    patterns = [f"{texts}/a/*.txt", f"{texts}/*/1*.txt"]
    found = [file.path for file in files_matching(patterns)]
    assert len(found) == len(set(found)) == len({*texts.glob("a/*.txt"), *texts.glob("*/1*.txt")})


def test_changed_files_are_read_again(texts):
    config = TextConfig(text=f"{texts}/**/*.txt", seq_len=16)
    first = open_corpus(config)
    path = texts / "a" / "0.txt"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, 10**18))
    assert open_corpus(config).train.file.digest != first.train.file.digest


def test_the_standard_library_is_the_default():
    files = standard_library()
    names = {file.name for file in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [name for name in names if "site-packages" in name or "test" in Path(name).parts]
    assert 5e6 < sum(file.size_bytes for file in files) < 30e6
    corpus = open_corpus(TextConfig())
    train, held = documents(corpus.train), documents(corpus.heldout)
    assert sorted(train + held) == contents(files)
    share = corpus.heldout.count / (corpus.train.count + corpus.heldout.count)
    assert 0.01 < share < 0.15
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
    """Files of ids from 0, 1000 and 2000 on."""
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


def test_a_source_without_a_sample_is_refused(three):
    with pytest.raises(DataError, match=r"too few tokens in .*2\.npy"):
        open_corpus(TextConfig(tokens=three, weights=[1, 1, 1], seq_len=120))


BAD_ARRAYS = {
    "floats": (np.ones(100), "float64"),
    "two dimensions": (np.ones((10, 10), int), r"\(10, 10\)"),
    "empty": (np.zeros(0, int), "empty"),
    "negative": (np.array([1, -7] * 50), "-7"),
    "objects": (np.array([1, "x"] * 50, object), "Python objects"),
    "short": (np.arange(10), "too few tokens"),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_arrays_that_are_no_tokens(tmp_path, kind):
    array, message = BAD_ARRAYS[kind]
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(TextConfig(tokens=str(tmp_path / "t.npy"), seq_len=16))
    assert caught.value.expected
    assert caught.value.found


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("Text.\n".encode("utf-16"), "UTF-16, according to its first bytes"),
        ("文字\n".encode("utf-16-be").join([codecs.BOM_UTF16_BE, b""]), "UTF-16, according to its first bytes"),
        ("Text.\n".encode("utf-32"), "UTF-32, according to its first bytes"),
        ("Text.\n".encode("utf-16-le"), "a zero byte at 1: a binary file, or UTF-16 without its mark"),
        (b"It looks well.\n" * 100 + b"\x7fELF\0", "a zero byte at 1504: a binary file, or UTF-16 without its mark"),
    ],
    ids=["UTF-16", "UTF-16BE", "UTF-32", "UTF-16 without mark", "binary"],
)
@pytest.mark.parametrize("piece_bytes", [8, 1 << 20])
def test_what_is_no_text_is_refused(tmp_path, monkeypatch, content, found, piece_bytes):
    monkeypatch.setattr(text_sources, "_PIECE_BYTES", piece_bytes)
    (tmp_path / "good.txt").write_bytes(codecs.BOM_UTF8 + "Größe.\n".encode() * 100)
    assert len(open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=8)).train)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match="is not text that can be trained on") as caught:
        open_corpus(TextConfig(text=f"{tmp_path}/*.txt", seq_len=8))
    assert "bad.txt" in caught.value.what and caught.value.found == found
    assert "-t UTF-8" in caught.value.next_step


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_files_that_are_no_arrays(tmp_path, content):
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(DataError, match="contains no tokens"):
        open_corpus(TextConfig(tokens=str(tmp_path / "t.npy")))


def test_an_array_cut_short(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(1000))
    os.truncate(tmp_path / "t.npy", 4000)
    with pytest.raises(DataError, match="contains no tokens"):
        open_corpus(TextConfig(tokens=str(tmp_path / "t.npy")))


def test_an_archive_of_arrays(tmp_path):
    np.savez(tmp_path / "t.npz", np.arange(1000))
    with pytest.raises(DataError, match=r"\.npz"):
        open_corpus(TextConfig(tokens=str(tmp_path / "t.npz")))


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
        ({"tokens": "/nowhere.npy"}, DataError, "No such file"),
        ({"dataset": "/nowhere"}, DataError, "no dataset in"),
        ({"tokenizer": "/nowhere.json"}, DataError, "No such file"),
        ({"text": "a", "weights": [0.5, 0.5]}, DataError, "invalid weights of the data"),
        ({"weights": [1.0, 2.0]}, DataError, "invalid weights of the data"),
        ({"tokens": ["a", "b"], "weights": [1.0, 0.0]}, DataError, "invalid weights of the data"),
        ({"text": "a", "tokens": "b"}, ConfigError, r"data\.text and data\.tokens"),
        ({"text": "a", "tokens": "b", "dataset": "c"}, ConfigError, r"data\.dataset"),
        ({"tokens": "a", "tokenizer": "b"}, ConfigError, "data.tokens and data.tokenizer conflict"),
        ({"seq_len": 0}, ConfigError, r"data\.seq_len"),
        ({"heldout": 1.0}, ConfigError, r"data\.heldout"),
        ({"heldout": -0.1}, ConfigError, r"data\.heldout"),
    ],
)
def test_options_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message) as caught:
        open_corpus(TextConfig(**options))
    assert caught.value.expected


@pytest.mark.parametrize("kind", ["text", "tokens", "dataset", "chat"])
def test_a_name_of_the_hub_is_answered_with_a_download(kind):
    for name, on_hub in (("org/some-data_1.5", True), ("folder/text.txt", False), ("org/data/more", False)):
        with pytest.raises(DataError) as caught:
            open_corpus(TextConfig(**{kind: name}))
        wanted = f"hf download {name} --repo-type dataset" if on_hub else f"correct --data.{kind}"
        assert wanted in caught.value.next_step


def test_empty_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").touch()
    with pytest.raises(DataError, match="empty"):
        open_corpus(TextConfig(text=f"{tmp_path}/*.txt"))


def test_too_few_tokens_for_a_window(tmp_path):
    (tmp_path / "a").write_text("x" * 100)
    with pytest.raises(DataError, match="at least 129") as caught:
        open_corpus(TextConfig(text=str(tmp_path / "a")))
    assert "seq_len" in caught.value.next_step
    assert len(open_corpus(TextConfig(text=str(tmp_path / "a"), seq_len=95)).train) == 1


def test_too_few_held_out_tokens_are_reported(tmp_path, caplog):
    (tmp_path / "a").write_text("x" * 500)
    assert open_corpus(TextConfig(text=str(tmp_path / "a"), seq_len=64)).heldout is None
    assert "no evaluation" in caplog.text


def test_a_file_that_cannot_be_read(texts, tmp_path, monkeypatch):
    class Unreadable(type(tmp_path)):
        def open(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied")

    listed = text_sources.files_matching([f"{texts}/**/*.txt"])
    listed[0] = text_sources.TextFile(Unreadable(listed[0].path), *list(vars(listed[0]).values())[1:])
    monkeypatch.setattr("hvdtrain.task.corpus.files_matching", lambda patterns, option: listed)
    with pytest.raises(DataError, match="Permission denied") as caught:
        open_corpus(TextConfig(text="any", seq_len=16))
    assert str(listed[0].path) in caught.value.what
