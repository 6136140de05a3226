from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hvdtrain.launch import worker_process
from hvdtrain.launch.worker_process import EVERY_S, BusyWorkers, find_work, waits_for_files

WAITING = "#include <unistd.h>\nint main(void) { if (vfork() == 0) { pause(); _exit(0); } return 0; }\n"
"""A parent waits for such a child as for a disk."""


def test_a_session_that_computes_is_detected() -> None:
    session = os.getsid(0)
    before = find_work([session, 0])[session][0]
    while find_work([session])[session][0] < before + 0.02:  # which itself takes time of the processor
        pass
    assert find_work([-1]) == {-1: (0.0, [])}


def test_a_session_that_waits_for_a_disk_is_detected(tmp_path: Path) -> None:
    (tmp_path / "waiting.c").write_text(WAITING)
    subprocess.run(["gcc", "-o", "waiting", "waiting.c"], cwd=tmp_path, check=True)
    with subprocess.Popen(["sh", "-c", "./waiting & wait"], cwd=tmp_path, start_new_session=True) as leader:
        try:
            while not any(map(waits_for_files, find_work([leader.pid])[leader.pid][1])):
                time.sleep(0.01)
        finally:
            os.killpg(leader.pid, signal.SIGKILL)


@pytest.mark.parametrize("waits", [False, True])
def test_a_quarter_of_a_core_since_the_last_look_is_work_and_so_is_waiting_for_a_disk(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "waits_for_files", lambda pid: waits and pid == 201)
    found = {pid: (3.0, [pid, pid + 100]) for pid in (100, 101, 102)}
    work = BusyWorkers(lambda leaders: {pid: found[pid] for pid in leaders})
    workers = {0: 100, 1: 101}
    assert work.find_busy(workers, 1000.0) == []
    more_s = EVERY_S / 4
    found |= {100: (3.0 + more_s, [100]), 101: (3.0 + more_s - 0.1, [101, 201]), 102: (99.0, [102])}
    assert work.find_busy(workers, 1000.0 + EVERY_S / 2) == []
    assert work.find_busy({**workers, 2: 102}, 1000.0 + EVERY_S) == [0, 1][: 1 + waits]
    found |= {101: (3.0 + more_s, [101]), 102: (99.0 + EVERY_S, [102])}
    assert work.find_busy({**workers, 2: 102}, 1000.0 + 2 * EVERY_S) == [2]
