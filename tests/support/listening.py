"""The toy, which writes down once on each rank what its process listens on and whether Horovod's notifications run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from hvdtrain import Task
from tests.support.toy import toy


def build(samples: int = 41) -> Task:
    """The toy.

    Args:
        samples: training samples
    """
    task = toy(samples=samples)
    loss, written = task.loss, Path(f"listening-{os.getpid()}.json")

    def looking(model, batch):  # type: ignore[no-untyped-def]
        if not written.exists():
            connections = psutil.Process().net_connections("inet")
            elastic = sys.modules.get("horovod.common.elastic")
            facts = {
                "ports": [[c.laddr.ip, c.laddr.port] for c in connections if c.status == "LISTEN"],
                "peers": [c.raddr.ip for c in connections if c.status == "ESTABLISHED"],
                "notifications": elastic is not None and elastic.notification_manager._service is not None,
            }
            written.write_text(json.dumps(facts))
        return loss(model, batch)

    return replace(task, loss=looking)
