"""What whole runs in this process need."""

from __future__ import annotations

import pytest

from hvdtrain.observe import recorder, step_stamps
from tests.support.launch import TIMEOUT_S


@pytest.fixture(autouse=True)
def _no_slow_sink_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_CLOSE_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(recorder, "_CLOSE_TIMEOUT_AFTER_FAILURE_S", TIMEOUT_S)
    monkeypatch.setattr(step_stamps, "_PATIENCE_S", TIMEOUT_S)
    monkeypatch.setattr(step_stamps, "_PATIENCE_WHEN_FAILED_S", TIMEOUT_S)
