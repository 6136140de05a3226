"""The program that `hvdtrain doctor --hosts` runs on each host. It answers questions and ends with the doctor.

Messages on stdin and stdout, in the format of `hvdtrain.runtime.json_lines`. No port is opened unless requested:

    hello   {"path", "folder"}          the first message; the reply is  says {"facts"}
    ask     {"number", "what", ...}     the reply is  answer {"number", "value"}  or  answer {"number", "error"}
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil

from hvdtrain.doctor.hosts.host_report import report_host
from hvdtrain.doctor.hosts.peers import Attempt, Listener, listen, measure, try_connection
from hvdtrain.files import read_text_or_empty
from hvdtrain.runtime.environment import environ
from hvdtrain.runtime.interfaces import interface_to, source_to
from hvdtrain.runtime.json_lines import MessageWriter, read_messages

LIFETIME_S = 600.0
"""A probe that loses its doctor, because the link is cut, ends after this time."""

_THREADS = 64
_VISIBLE_WITHIN_S = 3.0
"""How long a file written on one host may take to appear on another: network file systems cache their folders."""


def now_ns() -> int:
    """Return the wall clock of this host."""
    return time.time_ns()


def _reach(question: Mapping[str, Any]) -> dict[str, Attempt]:
    listeners = {name: Listener(**listener) for name, listener in question["doors"].items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = pool.map(try_connection, listeners.values())
    attempts = {}
    for (name, listener), fault in zip(listeners.items(), faults, strict=True):
        interface = interface_to(listener.address)
        state = psutil.net_if_stats().get(interface)
        attempts[name] = Attempt(fault, interface, state.mtu if state else 0)
    return attempts


def _sees_file(question: Mapping[str, Any]) -> bool:
    """Tell whether a file exists and has the expected content."""
    deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        if read_text_or_empty(Path(question["file"])) == question["text"]:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)


ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "clock": lambda question: now_ns(),
    "toward": lambda question: source_to(question["address"]),
    "listen": lambda question: listen(question["address"]),
    "reach": _reach,
    "measure": lambda question: measure(Listener(**question["door"]), question["budget_s"]),
    "write": lambda question: Path(question["file"]).write_text(question["text"]),
    "remove": lambda question: Path(question["file"]).unlink(missing_ok=True),
    "look": _sees_file,
}


def main(hello: Mapping[str, Any] | None = None) -> int:
    """Answer the doctor at the other end of stdin and stdout. `hello`: its first message, if already read."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output out of the messages
    limit = threading.Timer(LIFETIME_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    if hello is None:
        hello = next(read_messages(source), None)
    if hello is None or hello["type"] != "hello":
        sys.stderr.write("hvdtrain.doctor.hosts.host_probe is started by hvdtrain doctor, not by hand\n")
        return 2
    writer = MessageWriter(sink)
    writer.send("says", facts=msgspec.to_builtins(report_host(environ(), hello["folder"])))
    for question in read_messages(source):
        try:
            value = msgspec.to_builtins(ANSWERS[question["what"]](question))
            writer.send("answer", number=question["number"], value=value)
        except OSError as error:
            writer.send("answer", number=question["number"], error=str(error))
    sink.close()
    sys.stderr.flush()
    os._exit(0)  # does not wait for threads that listen


if __name__ == "__main__":
    sys.exit(main())
