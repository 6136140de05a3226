"""What `hvdtrain doctor --hosts` runs on each host: answers its questions, and ends with it.

Messages, by stdin and stdout as `hvdtrain.launch.agent_lines` has them; no port is opened that was not asked for:

    hello   {"path", "folder"}          the first; answered by  says {"facts"}
    ask     {"number", "what", ...}     answered by  answer {"number", "value"}  or  answer {"number", "error"}
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.doctor.hosts.host_facts import host_says
from hvdtrain.doctor.hosts.network import address_toward, route_to
from hvdtrain.doctor.hosts.peers import Door, Tried, measure, open_door, try_door
from hvdtrain.runtime.environment import environ
from hvdtrain.runtime.json_lines import MessageWriter, read_messages

MOST_S = 600.0
"""A probe whose doctor does not let go of it, because the link is cut, ends by itself."""

_THREADS = 64
_LOOK_S = 3.0
"""For what was written on one host to be seen on another, whose file system may look for news now and then only."""


def now_ns() -> int:
    """The clock of this host."""
    return time.time_ns()


def _toward(asked: Mapping[str, Any]) -> str:
    return address_toward(str(asked["address"]))


def _listen(asked: Mapping[str, Any]) -> dict[str, Any]:
    return asdict(open_door(str(asked["address"])))


def _reach(asked: Mapping[str, Any]) -> dict[str, Any]:
    doors = {name: Door(**door) for name, door in asked["doors"].items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = list(pool.map(try_door, doors.values()))
    return {
        name: asdict(Tried(fault, *route_to(door.address)))
        for (name, door), fault in zip(doors.items(), faults, strict=True)
    }


def _measure(asked: Mapping[str, Any]) -> dict[str, Any]:
    return asdict(measure(Door(**asked["door"]), float(asked["budget_s"])))


def _write(asked: Mapping[str, Any]) -> None:
    Path(asked["file"]).write_text(asked["text"])


def _remove(asked: Mapping[str, Any]) -> None:
    Path(asked["file"]).unlink(missing_ok=True)


def _look(asked: Mapping[str, Any]) -> bool:
    """Whether a file is there with what was written into it."""
    until_s = time.monotonic() + _LOOK_S
    while True:
        try:
            if Path(asked["file"]).read_text() == asked["text"]:
                return True
        except OSError:
            pass
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)


ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "clock": lambda asked: now_ns(),
    "toward": _toward,
    "listen": _listen,
    "reach": _reach,
    "measure": _measure,
    "write": _write,
    "remove": _remove,
    "look": _look,
}


def main(hello: Mapping[str, Any] | None = None) -> int:
    """Serve the doctor at the other end of stdin and stdout. `hello`: its first message, if that was read already."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the lines
    limit = threading.Timer(MOST_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    if hello is None:
        hello = next(read_messages(source), None)
    if hello is None or hello["type"] != "hello":
        sys.stderr.write("hvdtrain.doctor.hosts.host_probe is started by hvdtrain doctor, not by hand\n")
        return 2
    writer = MessageWriter(sink)
    writer.send("says", facts=asdict(host_says(environ(), hello["folder"])))
    for asked in read_messages(source):
        try:
            writer.send("answer", number=asked["number"], value=ANSWERS[asked["what"]](asked))
        except OSError as error:
            writer.send("answer", number=asked["number"], error=str(error))
    sink.close()
    sys.stderr.flush()
    os._exit(0)  # threads that listen hold nobody up


if __name__ == "__main__":
    sys.exit(main())
