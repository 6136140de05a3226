"""The driver's side of an agent."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from hvdtrain.launch import agent_link as link
from hvdtrain.launch.agent_link import AgentLink


def test_an_agent_that_ends_at_once_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its output has ended before all threads are started."""

    class Eager(threading.Thread):
        def __init__(self, target: Any, **others: Any) -> None:
            super().__init__(target=target, **others)
            self.reads = target.__name__ == "_read"

        def start(self) -> None:
            super().start()
            if self.reads:
                self.join()

    monkeypatch.setattr(link.threading, "Thread", Eager)
    heard: SimpleQueue[tuple[AgentLink, dict[str, Any]]] = SimpleQueue()
    agent = AgentLink("a", [sys.executable, "-c", "import sys; sys.exit('no such host')"], {}, heard.put)
    agent.start()
    assert heard.get(timeout=60)[1] == {"type": "gone", "why": "no such host"}
    agent.close()
    agent.wait()
