"""Many processes make a folder together, are killed, find no room."""

import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from hvdtrain.errors import DataError, TransientDataError
from hvdtrain.task.once_per_host import once_per_host

PROLOGUE = """
import sys
from hvdtrain.task.once_per_host import once_per_host

def say(line):
    print(line, flush=True)

def build(folder):
    say("built")
    (folder / "whole").write_text("text" * 10_000)

def prepare(build=build):
    say(once_per_host("corpus", "key", build, lambda folder: (folder / "whole").exists()))
"""


def start(script, tmp_path):
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def prepare(build=lambda folder: (folder / "whole").touch()):
    return once_per_host("corpus", "key", build, lambda folder: (folder / "whole").exists())


def forbidden(folder):
    raise AssertionError("it is not built again")


def left_over(cache):
    return [path.name for path in cache.iterdir() if ".tmp-" in path.name]


@pytest.mark.slow
def test_ranks_that_start_together_build_once(tmp_path, cache):
    ranks = [start("say('ready'); sys.stdin.readline(); prepare()", tmp_path) for _ in range(6)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    answers = [rank.communicate()[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 6
    assert sum("built" in answer for answer in answers) == 1
    assert {answer[-1] for answer in answers} == {str(cache / "key")} and not left_over(cache)


@pytest.mark.slow
def test_killed_half_way_leaves_nothing_wrong(tmp_path, cache):
    script = """
    def half(folder):
        (folder / "part").touch()
        say("half")
        sys.stdin.readline()
    prepare(half)
    """
    victim = start(script, tmp_path)
    assert victim.stdout.readline() == "half\n"
    waiting = start("say('ready'); prepare()", tmp_path)
    assert waiting.stdout.readline() == "ready\n" and left_over(cache)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert waiting.communicate()[0].splitlines() == ["built", str(cache / "key")]
    assert not left_over(cache) and [path.name for path in (cache / "key").iterdir()] == ["whole"]


def test_a_damaged_folder_is_rebuilt_and_a_whole_one_is_marked_as_used(cache):
    folder = prepare()
    (folder / "whole").unlink()
    assert prepare() == folder == cache / "key" and (folder / "whole").exists()
    os.utime(folder, (0, 0))
    assert prepare(forbidden) == folder and folder.stat().st_mtime > 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("something is wrong"), ["wrong"]),
        (OSError(errno.ENOSPC, "No space"), ["no folder can store", "corpus: No space", "XDG_CACHE_HOME"]),
    ],
)
def test_an_error_while_building_leaves_nothing(tmp_path, error, words):
    def fail(folder):
        (folder / "whole").touch()
        raise error

    with pytest.raises(TransientDataError if isinstance(error, OSError) else DataError) as caught:
        prepare(fail)
    assert all(word in str(caught.value) for word in words)
    assert {path.name for path in tmp_path.rglob("corpus/*")} == {"key.lock"}


@pytest.fixture
def substitute(tmp_path, monkeypatch):
    """The user's folder in the temporary folder; no cache can be written."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    return tmp_path / f"hvdtrain-{os.getuid()}"


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(substitute, caplog):
    folder = prepare()
    once_per_host("corpus", "another", lambda it: (it / "whole").touch(), lambda it: (it / "whole").exists())
    assert len(caplog.messages) == 1, "streamed text would warn again and again"
    assert folder.is_relative_to(substitute) and substitute.stat().st_mode & 0o077 == 0
    assert prepare(forbidden) == folder


def test_a_temporary_folder_of_another_user_is_not_trusted(substitute, monkeypatch):
    prepare()
    mine = os.getuid()
    substitute.rename(substitute.with_name(f"hvdtrain-{mine + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(DataError, match="belongs to another user"):
        prepare()
