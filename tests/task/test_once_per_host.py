"""Many processes make tokens together, are killed, find no room. The processes are real."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hvdtrain.errors import DataError
from hvdtrain.task.corpus import TextConfig, open_corpus

PROLOGUE = """
import os, sys
from pathlib import Path
import hvdtrain.task.corpus as corpus
import hvdtrain.task.text_sources as sources
config = corpus.TextConfig(text=sys.argv[1] + "/*.txt", seq_len=8)
say = lambda line: print(line, flush=True)
"""


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"text number {index}\n" * 500)
    return folder


def start(script, texts, tmp_path):
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(script), str(texts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


BUILD_AND_TELL = """
write = corpus.write_tokens
def told(*args, **kwargs):
    say("built")
    return write(*args, **kwargs)
corpus.write_tokens = told
say("ready")
sys.stdin.readline()
say(corpus.open_corpus(config).train.file)
"""

STOP_HALF_WAY = """
pieces = sources._pieces
def half(path):
    yield from pieces(path)
    if path.name.startswith("5"):
        say("half")
        sys.stdin.readline()
sources._pieces = half
corpus.open_corpus(config)
say("whole")
"""


@pytest.mark.slow
def test_ranks_that_start_together_build_once(texts, tmp_path, cache):
    ranks = [start(BUILD_AND_TELL, texts, tmp_path) for _ in range(6)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    answers = [rank.communicate()[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 6
    assert sum("built" in answer for answer in answers) == 1
    assert len({answer[-1] for answer in answers}) == 1
    assert left_over(cache) == []


def left_over(cache):
    return [path for path in cache.iterdir() if ".tmp-" in path.name]


@pytest.mark.slow
def test_killed_half_way_leaves_nothing_wrong(texts, tmp_path, cache):
    victim = start(STOP_HALF_WAY, texts, tmp_path)
    assert victim.stdout.readline() == "half\n"
    waiting = start(BUILD_AND_TELL, texts, tmp_path)
    waiting.stdin.write("go\n")
    waiting.stdin.flush()
    assert waiting.stdout.readline() == "ready\n"
    assert left_over(cache)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    answer = waiting.communicate()[0].splitlines()
    assert answer[0] == "built"
    assert left_over(cache) == []
    found = open_corpus(TextConfig(text=f"{texts}/*.txt", seq_len=8))
    assert str(found.train.file) == answer[-1]
    assert found.train.file.map().size == sum(path.stat().st_size + 1 for path in texts.iterdir())


def test_a_damaged_cache_is_rebuilt_and_a_whole_one_is_marked_as_used(texts):
    config = TextConfig(text=f"{texts}/*.txt", seq_len=8)
    first = open_corpus(config)
    os.truncate(first.train.file.path, 100)
    assert open_corpus(config).train.file == first.train.file  # in the same place
    assert first.train.file.map().size == first.train.count + first.heldout.count
    folder = Path(first.train.file.path).parent
    os.utime(folder, (0, 0))
    assert open_corpus(config).train.file == first.train.file
    assert folder.stat().st_mtime > 0


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(texts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config = TextConfig(text=f"{texts}/*.txt", seq_len=8)
    first = open_corpus(config)
    place = tmp_path / f"hvdtrain-{os.getuid()}"
    assert first.train.file.path.startswith(str(place))
    assert place.stat().st_mode & 0o077 == 0
    monkeypatch.setattr("hvdtrain.task.corpus.write_tokens", None)  # not called again
    assert open_corpus(config) is not None


def test_a_temporary_folder_of_another_user_is_not_trusted(texts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config = TextConfig(text=f"{texts}/*.txt", seq_len=8)
    open_corpus(config)
    mine = os.getuid()
    (tmp_path / f"hvdtrain-{mine}").rename(tmp_path / f"hvdtrain-{mine + 1}")
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(DataError, match="belongs to another user"):
        open_corpus(config)


def test_no_room_is_an_error_that_leaves_nothing(texts, tmp_path, cache):
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        corpus.open_corpus(config)
    except corpus.DataError as error:
        say(error)
    """
    answer = start(script, texts, tmp_path).communicate()[0]
    assert "no folder can store" in answer
    assert str(cache) in answer
    assert "XDG_CACHE_HOME" in answer
    assert list(tmp_path.rglob("*.bin")) == []


def test_an_error_while_building_leaves_nothing(texts, cache, monkeypatch):
    monkeypatch.setattr("hvdtrain.task.corpus.write_tokens", fail)
    with pytest.raises(DataError, match="wrong"):
        open_corpus(TextConfig(text=f"{texts}/*.txt"))
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def fail(folder, *args, **kwargs):
    (folder / "tokens.bin").write_bytes(b"half")
    raise DataError("something is wrong")
