"""Lines of the ledger survive any end of the process; a failing disk costs only the ledger."""

from __future__ import annotations

import multiprocessing
import os
import signal
import zlib
from array import array
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from hvdtrain.state.ledger import Ledger, StartHeader, ledger_file_name, next_start


def _head(start: int = 0, rank: int = 0) -> StartHeader:
    return StartHeader(start, "started", 0, 0, 2, rank, "here", 7, 8, 2, 100, "data")


def _bytes(*indices: int) -> bytes:
    return array("q", indices).tobytes()


def test_ranges_are_merged_and_the_checksum_is_of_all_indices(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, pytest.fail)
    ledger.begin_start(_head())
    ledger.add_samples(0, 2, _bytes(5, 3))
    ledger.add_samples(2, 4, _bytes(1, 9))
    ledger.add_samples(6, 7, _bytes(4))
    ledger.write(1)
    ledger.write(2)
    head, *lines = map(orjson.loads, (tmp_path / ledger_file_name()).read_bytes().split())
    assert (head["seed"], head["global_batch"], head["left_out"]) == (7, 8, [])
    assert lines == [[0, 0, 1, [[0, 4], [6, 7]], zlib.crc32(_bytes(5, 3, 1, 9, 4))], [0, 0, 2, [], 0]]


def test_all_starts_of_a_host_are_in_one_file(tmp_path: Path) -> None:
    assert next_start(tmp_path / "none") == 0
    ledger = Ledger(tmp_path, pytest.fail)
    (tmp_path / "another-host.jsonl").write_bytes(b'\n{"version":2,"start":3,"why":"started"}\n[3,7,1,[],0]\n[3')
    for start in (4, 5, 12345):
        assert next_start(tmp_path) <= start
        ledger.begin_start(_head(start, rank=1))
        ledger.write(1)
    assert len(list(tmp_path.iterdir())) == 2
    assert next_start(tmp_path) == 12346
    for step in range(2, 5000):
        ledger.write(step)
    assert next_start(tmp_path) == 12346, "also where its header is far away"


def _write_and_die(folder: Path) -> None:
    ledger = Ledger(folder, print)
    ledger.begin_start(_head())
    for step in range(1, 1001):
        ledger.add_samples(step, step + 1, b"")
        ledger.write(step)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len((tmp_path / ledger_file_name()).read_bytes().split()) == 1001


@pytest.mark.parametrize("where", ["begin", "write", "sync"])
def test_a_failing_disk_is_reported_once(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    if where == "begin":
        (tmp_path / "ledger").write_text("a file where the folder should be")
    ledger = Ledger(tmp_path / "ledger", told.append)
    ledger.begin_start(_head())
    if where == "write":
        monkeypatch.setattr(os, "write", lambda file, line: len(line) - 1)
    elif where == "sync":
        monkeypatch.setattr(os, "fsync", lambda file: os.close(-1))
    for step in (1, 2):
        ledger.add_samples(step, step + 1, b"")
        ledger.write(step)
        ledger.sync()
    (text,) = told
    assert "Training continues" in text


@pytest.mark.parametrize("room", [0, 1, 7])
def test_lines_that_found_no_room_are_written_later_once(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    ledger, write = Ledger(tmp_path, told.append), os.write
    ledger.begin_start(_head())
    ledger.write(1)
    monkeypatch.setattr(os, "write", lambda file, lines: write(file, bytes(lines)[:room]))
    for step in (2, 3):
        ledger.write(step)
    monkeypatch.setattr(os, "write", write)
    ledger.write(4)
    ledger.begin_start(_head(1))
    lines = []
    for line in (tmp_path / ledger_file_name()).read_bytes().split(b"\n"):
        with suppress(orjson.JSONDecodeError):
            lines.append(orjson.loads(line))
    assert [line[2] if isinstance(line, list) else line["start"] for line in lines] == [0, 1, 2, 3, 4, 1]
    assert len(told) == 1
