from __future__ import annotations

import time

import pytest

from hvdtrain.runtime import clock


@pytest.mark.parametrize("jump_s", [-1e7, 3600.0])
def test_steady_time_is_the_start_plus_the_elapsed_time(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before, wall, monotonic = clock.steady_s(), time.time, time.monotonic
    assert abs(before - wall()) < 60  # no more than the machine's clock was mended since this process began
    monkeypatch.setattr(clock.time, "time", lambda: wall() + jump_s)
    monkeypatch.setattr(clock.time, "monotonic", lambda: monotonic() + 5)
    assert before + 5 <= clock.steady_s() < before + 65
