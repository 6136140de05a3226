"""A lease: one holder who lives, and none who does not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import lease
from hvdtrain.lease import Lease, take_lease
from hvdtrain.training import run_directory
from hvdtrain.training.run_directory import RunDirectory


def _take(path: Path) -> Lease | None:
    return take_lease(path, lambda seconds: pytest.fail("of a holder on this host no beat is waited for"))


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = _take(tmp_path / "l")
    assert first is not None
    assert _take(tmp_path / "l") is None
    first.release()
    second = _take(tmp_path / "l")
    assert second is not None
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom hvdtrain.lease import take_lease\n"
        "assert take_lease(Path(sys.argv[1]))\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "l")]).returncode == -9
    assert (tmp_path / "l").exists()
    held = _take(tmp_path / "l")
    assert held is not None
    held.release()


def test_a_process_number_that_was_given_anew_is_no_holder(tmp_path: Path) -> None:
    held = _take(tmp_path / "l")
    assert held is not None
    content = json.loads((tmp_path / "l").read_text())
    held.release()
    (tmp_path / "l").write_text(json.dumps({**content, "began": "1"}))
    again = _take(tmp_path / "l")
    assert again is not None
    again.release()


def test_who_is_slower_to_find_it_stale_does_not_take_it_from_who_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l"
    path.write_text(json.dumps({**FAR, **lease._where()}))
    faster: list[Lease | None] = []

    def look(*_: object) -> bool:
        if not faster:
            faster.append(None)  # the other one looks too, and sees the same
            faster[0] = _take(path)
        return False

    monkeypatch.setattr(lease, "_lives", look)
    assert _take(path) is None
    assert faster[0] is not None and lease._read(path)["pid"] == os.getpid()
    faster[0].release()
    assert list(tmp_path.iterdir()) == []


FAR = {"nonce": "a", "boot": "of another host", "container": "", "pid": 1, "began": "1"}


@pytest.mark.parametrize("lives", [True, False])
def test_a_holder_elsewhere_is_known_by_its_beats(tmp_path: Path, lives: bool) -> None:
    path, waits = tmp_path / "l", []
    path.write_text(json.dumps(FAR))

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if lives and len(waits) == 3:
            path.write_text(json.dumps({**FAR, "beats": 1}))

    taken = take_lease(path, wait)
    assert (taken is None) == lives
    assert 2 * lease.BEAT_S < sum(waits) <= 20
    if taken is not None:
        taken.release()


def test_of_two_who_find_it_stale_one_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "l"
    path.write_text(json.dumps(FAR))
    faster: list[Lease | None] = []

    def wait(seconds: float) -> None:
        if not faster:
            faster.append(None)
            faster[0] = take_lease(path, lambda seconds: None)

    assert take_lease(path, wait) is None
    assert faster[0] is not None
    faster[0].release()


def test_a_holder_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.001)
    held = _take(tmp_path / "l")
    assert held is not None
    while "beats" not in json.loads((tmp_path / "l").read_text()):
        pass
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_is_claimed_once_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    first = run_directory._claim(tmp_path / "run")
    assert isinstance(first, RunDirectory)
    assert run_directory._claim(tmp_path / "run") is None
    first.release()
    again = run_directory._claim(tmp_path / "run")
    assert again is not None
    again.release()


def test_who_has_lost_it_does_not_take_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.001)
    held = _take(tmp_path / "l")
    assert held is not None
    others = json.dumps({"nonce": "another's"})
    while held._thread.is_alive():  # a beat that is under way may still be written over it
        (tmp_path / "new").write_text(others)
        (tmp_path / "new").replace(tmp_path / "l")
        held._thread.join(0.01)
    held.release()
    assert (tmp_path / "l").read_text() == others
