from __future__ import annotations

import os

from hvdtrain.launch.worker_process import EVERY_S, BusyWorkers, cpu_seconds


def test_a_session_that_computes_is_detected() -> None:
    session = os.getsid(0)
    before = cpu_seconds([session, 0])
    while cpu_seconds([session])[session] < before[session] + 0.02:  # which itself takes time of the processor
        pass
    assert cpu_seconds([-1]) == {-1: 0.0}


def test_a_quarter_of_a_core_since_the_last_look_is_work() -> None:
    used = {100: 3.0, 101: 3.0, 102: 3.0}
    work = BusyWorkers(lambda leaders: {pid: used[pid] for pid in leaders})
    workers = {0: 100, 1: 101}
    assert work.find_busy(workers, 1000.0) == []
    used.update({100: 3.0 + EVERY_S / 4, 101: 3.0 + EVERY_S / 4 - 0.1, 102: 99.0})
    assert work.find_busy(workers, 1000.0 + EVERY_S / 2) == []
    assert work.find_busy({**workers, 2: 102}, 1000.0 + EVERY_S) == [0]
    used.update({102: 99.0 + EVERY_S})
    assert work.find_busy({**workers, 2: 102}, 1000.0 + 2 * EVERY_S) == [2]
