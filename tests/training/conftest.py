"""What whole runs in this process need."""

from __future__ import annotations

import pytest

from hvdtrain.observe import recorder, step_stamps
from tests.support.launch import TIMEOUT_S


@pytest.fixture(autouse=True)
def _no_slow_sink_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recorder, step_stamps):
        for name in ("_CLOSE_TIMEOUT_S", "_CLOSE_TIMEOUT_AFTER_FAILURE_S"):
            monkeypatch.setattr(module, name, TIMEOUT_S)
