"""``python -m hvdtrain.launch.agent``: start, monitor and end the workers of one host on the driver's orders.

Its only open port is that of `Rendezvous`, on the loopback. It forwards the messages of `hvdtrain.runtime.channel` in
both directions. Its own messages:

From the driver:
    hello    {"host", "folder", "environment", "remote", "path", "driver"}   the first; driver: an address of it
    start    {"worker", "argv", "environment"}             variables on top of those of hello and of the host
    tell     {"worker", "what", "facts"}
    kill     {"worker", "after_s"}   signal  {"worker", "name"}
    open     {"round", "keys"}   open the store of this round; 0: of none
    keys     {"round", "keys"}   values from ranks of all hosts, as `agent_link.Readers` makes them
    beat     {}             heartbeat, each second
To the driver:
    ready    {"pid", "store", "address", "interface", "networks"}   address, interface: those towards the driver, ""
             if unknown; networks: interfaces of this host by network, as of `interfaces.networks`
    said     {"worker", "message"}   line  {"worker", "text", "err"}   dying  {"worker"}   exited  {"worker", "code"}
    put      {"round", "key", "value"}   by host, as of `agent_link.Readers`
    log      {"text"}
    beat     {"halted": {worker: bool}, "busy": [worker]}   heartbeat, each second; busy: by `BusyWorkers`
When the driver's end closes, the agent ends all workers and itself. It forwards SIGTERM to its workers. Batch systems
send SIGTERM to all processes at once; an agent that ended by it would not leave the ranks time to save.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from typing import IO, Any

from hvdtrain.errors import CANNOT_START
from hvdtrain.files import allow_open_files
from hvdtrain.launch.agent_link import Readers, unpacked
from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.variables import agent_environment
from hvdtrain.launch.worker_process import BusyWorkers, WorkerProcess
from hvdtrain.runtime.channel import BEAT_S, MessageWriter, read_messages
from hvdtrain.runtime.environment import environ
from hvdtrain.runtime.interfaces import interface_of, nccl_interfaces, networks, source_to

TERM_S = 5.0
"""Between SIGTERM and SIGKILL when the driver is lost."""

_CUT_S = 60.0  # silence of a driver on another host after which the link counts as cut

_OF_THIS_HOST = "local_"  # prefix of the keys of Horovod's communicator within a host; no other host needs them


class Agent:
    """One host's side of a job."""

    def __init__(self, hello: Mapping[str, Any], writer: MessageWriter) -> None:
        self._folder = str(hello["folder"])
        self._environment = {**agent_environment(environ()), **hello["environment"]}
        self._driver = str(hello["driver"])
        self._nccl = {"NCCL_SOCKET_IFNAME": found} if (found := nccl_interfaces()) else {}
        self._remote = bool(hello["remote"])
        self._writer = writer
        self._workers: dict[int, WorkerProcess] = {}
        self._ended: list[WorkerProcess] = []
        self._lock = threading.Lock()
        self._last_message_s = time.monotonic()
        self._ending = threading.Lock()
        self._readers = Readers({})
        self.rendezvous = Rendezvous(lambda text: writer.send("log", text=text), put=self._put)

    def run(self, source: IO[bytes]) -> None:
        """Execute the driver's messages until it closes the connection."""
        self.rendezvous.start()
        came_by = environ().get("SSH_CONNECTION", "").split()
        address = (came_by[2] if len(came_by) == 4 else source_to(self._driver)) if self._remote else ""
        place = {"address": address, "interface": interface_of(address), "networks": networks()}
        self._writer.send("ready", pid=os.getpid(), store=self.rendezvous.address, **place)
        for run in (self._beat, self._watch_link):
            threading.Thread(target=run, daemon=True).start()
        for message in read_messages(source):
            self._last_message_s = time.monotonic()
            self._handle(message)
        self.end()

    def end(self) -> None:
        """End all workers: close their channels, then SIGTERM, then SIGKILL."""
        with self._ending:
            with self._lock:
                workers = list(self._workers.values())
            for worker in workers:
                worker.channel.close()
                worker.kill(signal.SIGTERM)
            until = time.monotonic() + TERM_S
            while self._workers and time.monotonic() < until:
                time.sleep(0.05)
            for worker in workers:
                worker.kill()
            for worker in [*workers, *self._ended]:  # the last lines of a failed rank say why
                worker.drain(max(0.0, until - time.monotonic()) + 1.0)

    def forward_sigterm(self) -> None:
        """Forward SIGTERM to the workers. They ask the driver whether to leave or save; this process outlives them."""
        for worker in list(self._workers.values()):
            worker.send_signal("SIGTERM")

    def report_thread_failure(self, failed: threading.ExceptHookArgs) -> None:
        """Report a failed thread of this process to the driver: its task is no longer done."""
        lines = traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
        name = failed.thread.name if failed.thread is not None else "?"
        self._writer.send("log", text=f"thread {name} of the agent has failed:\n{''.join(lines)}")

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "start":
            self._start(int(message["worker"]), message)
        elif kind == "open":
            self._readers = Readers(message["keys"])
            self.rendezvous.open(message["round"], {k: v.encode() for k, v in message["keys"].items()})
        elif kind == "keys":
            self.rendezvous.add(message["round"], {k: partial(unpacked, v) for k, v in message["keys"].items()})
        elif kind in ("tell", "kill", "signal"):
            with self._lock:
                worker = self._workers.get(message["worker"])
            if worker is None:
                return
            if kind == "tell":
                worker.channel.send(message["what"], **message["facts"])
            elif kind == "kill":
                worker.kill_after(float(message["after_s"]))
            else:
                worker.send_signal(message["name"])

    def _start(self, number: int, message: Mapping[str, Any]) -> None:
        variables = {**self._nccl, **self._environment, **message["environment"]}
        try:
            worker = WorkerProcess(message["argv"], variables, self._folder, partial(self._report, number))
        except OSError as error:
            self._writer.send("line", worker=number, text=f"hvdtrain: cannot be started: {error}", err=True)
            self._writer.send("exited", worker=number, code=CANNOT_START)
            return
        with self._lock:
            self._workers[number] = worker
        worker.start()

    def _report(self, number: int, kind: str, **facts: Any) -> None:
        if kind == "exited":
            with self._lock:
                ended = [*self._ended, self._workers.pop(number)] if number in self._workers else self._ended
                self._ended = [worker for worker in ended if not worker.is_drained()]
        self._writer.send(kind, worker=number, **facts)

    def _beat(self) -> None:
        work = BusyWorkers()
        while True:
            time.sleep(BEAT_S)
            with self._lock:
                halted = {number: worker.is_stopped() for number, worker in self._workers.items()}
                processes = {number: worker.pid for number, worker in self._workers.items()}
            self._writer.send("beat", halted=halted, busy=work.find_busy(processes, time.monotonic()))

    def _watch_link(self) -> None:
        """End everything when the link is cut. Report nothing: a write to a cut link may block for ever."""
        before = time.monotonic()
        while True:
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - before > _CUT_S / 2:
                self._last_message_s = now  # this host was suspended, which is no fault of the driver
            before = now
            if self._remote and now - self._last_message_s > _CUT_S:
                self.end()
                os._exit(1)

    def _put(self, number: int, key: str, value: bytes) -> None:
        if not key.startswith(_OF_THIS_HOST):
            self._writer.send("put", round=number, key=key, value=self._readers.divide(key, value))


def main(hello: Mapping[str, Any] | None = None) -> int:
    """Serve the driver at the other end of stdin and stdout. `hello`: its first message, if already read."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no other output may mix with the messages
    if hello is None:
        hello = next(read_messages(source), None)
    if hello is None or hello["type"] != "hello":
        sys.stderr.write("hvdtrain.launch.agent is started by hvdtrain launch, not by hand\n")
        return 2
    allow_open_files()
    agent = Agent(hello, MessageWriter(sink))
    threading.excepthook = agent.report_thread_failure
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # The handler may interrupt code that holds a lock: do the work in another thread.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=agent.forward_sigterm, daemon=True).start())
    agent.run(source)
    sink.close()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    sys.exit(main())
