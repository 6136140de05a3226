"""How long hundreds of ranks take to find each other by the stores of our own driver, one on each host.

The ranks are threads that put and get what Gloo does for its three communicators (gloo/rendezvous/context.cc); the
agents are real processes, and values go between them by the driver's code. All is on one machine: on a cluster each
host has cores of its own for its ranks, whose reading is nearly all of the work. With --slice all ranks put, but only
those of the first host get. That is the load of one host of many: all 1,024 ranks would read 292 GB on this machine.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import psutil
from common import Figure, figure, options, report

from hvdtrain.launch.agent_link import AgentLink, Relay
from hvdtrain.launch.worker_plan import AGENT
from hvdtrain.runtime.channel import encode_message

ADDRESS_BYTES = 136
ROUND = 1
READ_BYTES = 1 << 18
TRIES = 3
AGAIN_S = 0.5
TIMEOUT_S = 60.0
PROCESSES = 2


class Rank(NamedTuple):
    """One of `hosts` * `local` ranks, and the store of its host as Horovod is given it."""

    number: int
    hosts: int
    local: int
    store: str
    reads: bool = True


def round_keys(hosts: int, local: int) -> dict[str, str]:
    """The keys of a round with `local` ranks on each host."""
    places, size = product(range(hosts), range(local)), hosts * local
    return {f"rank_and_size/h{h}:{own}": f"{h * local + own},{size},{own},{local},{h},{hosts}" for h, own in places}


def addresses(own: int, size: int) -> bytes:
    """What a rank of Gloo puts: the address of its socket and the number of the pair, for each other rank."""
    return b"".join(struct.pack("<HH124xq", 2, 4000 + own, 9000 + pair) for pair in range(size - 1))


def ask(store: str, method: str, key: str, body: bytes = b"") -> bytes | None:
    """A request as Horovod's C++ makes it, with a connection of its own; None where there is no such key."""
    address, _, path = store.partition("/")
    host, _, port = address.partition(":")
    head = f"{method} /{path}:0/{key} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(TRIES):
        parts = []
        try:
            with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
                connection.sendall(head.encode() + body)
                while part := connection.recv(READ_BYTES):
                    parts.append(part)
        except ConnectionError:
            parts = []
        head_of, _, value = b"".join(parts).partition(b"\r\n\r\n")
        if head_of[9:12] in (b"200", b"404"):
            return value if head_of[9:12] == b"200" else None
        time.sleep(AGAIN_S)
    raise ConnectionError(f"{method} {key} failed {TRIES} times")


def meet(rank: Rank) -> tuple[float, float]:
    """Do what Gloo does to connect to all; the longest wait for a key, and when all were read, in seconds.

    Who has read all waits for the others in a barrier: the times of two ranks may differ by Gloo's timeout.
    """
    host, local = divmod(rank.number, rank.local)
    waited_s = _connect(rank, "global", rank.number, rank.hosts * rank.local)
    done_s = time.monotonic()
    _connect(rank, f"local_h{host}", local, rank.local)
    _connect(rank, f"cross_{local}", host, rank.hosts)
    return waited_s, done_s


def _connect(rank: Rank, scope: str, own: int, size: int) -> float:
    ask(rank.store, "PUT", f"{scope}/rank_{own}", f"h{rank.number // rank.local}".encode())
    for other in range(own if rank.reads else 0):
        ask(rank.store, "GET", f"{scope}/rank_{other}")
    ask(rank.store, "PUT", f"{scope}/{own}", addresses(own, size))
    longest_s = 0.0
    for other in range(size if rank.reads else 0):
        if other != own:
            began_s = time.monotonic()
            while ask(rank.store, "GET", f"{scope}/{other}") is None:
                time.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - began_s)
            value = ask(rank.store, "GET", f"{scope}/{other}")
            assert value is not None and len(value) == ADDRESS_BYTES * (size - 1)
            slot = own - (own > other)
            assert struct.unpack_from("<HH124xq", value, ADDRESS_BYTES * slot) == (2, 4000 + other, 9000 + slot)
    return longest_s


class Hosts:
    """Agents on this machine, and a driver's part between them."""

    def __init__(self, number: int, local: int) -> None:
        self.sent_bytes = 0
        self._inbox: queue.SimpleQueue[tuple[AgentLink, dict[str, Any]]] = queue.SimpleQueue()
        argv = [sys.executable, "-m", AGENT]
        self._links = [AgentLink(f"h{host}", argv, os.environ, self._inbox.put) for host in range(number)]
        self._relay = Relay(self._send, self._send_to)
        for link in self._links:
            link.start()
            link.send("hello", host=link.host, folder=".", environment={}, remote=False, driver="")
        while not all(link.store for link in self._links):
            link, message = self._inbox.get()
            link.store = message.get("store", link.store)
        self._relay.open(ROUND, round_keys(number, local))
        threading.Thread(target=self._drive, daemon=True).start()

    def stores(self) -> list[str]:
        """As ranks are given them."""
        return [f"{link.store}/{ROUND}" for link in self._links]

    def close(self) -> None:
        """End the agents."""
        for link in self._links:
            link.close()

    def _send(self, kind: str, **facts: Any) -> None:
        data = encode_message(kind, facts)
        for link in self._links:
            self.sent_bytes += len(data)
            link.write(data)

    def _send_to(self, host: str, kind: str, **facts: Any) -> None:
        data = encode_message(kind, facts)
        self.sent_bytes += len(data)
        next(link for link in self._links if link.host == host).write(data)

    def _drive(self) -> None:
        while True:
            message = self._inbox.get()[1]
            while True:
                if message["type"] == "put":
                    self._relay.put(message["round"], message["key"], message["value"])
                try:
                    message = self._inbox.get_nowait()[1]
                except queue.Empty:
                    break
            self._relay.flush()


def run(ranks: Sequence[Rank]) -> list[tuple[float, float]]:
    """All of these meet, each in a thread."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [*threads.map(meet, ranks)]


def simulate(hosts: int, local: int, only_first: bool) -> list[Figure]:
    size, there = hosts * local, Hosts(hosts, local)
    try:
        stores = there.stores()
        ranks = [Rank(n, hosts, local, stores[n // local], n < local or not only_first) for n in range(size)]
        began_s = time.monotonic()
        with ProcessPoolExecutor(PROCESSES) as pool:
            parts = pool.map(run, [ranks[n::PROCESSES] for n in range(PROCESSES)])
            times = {
                rank.number: time_s
                for n, part in enumerate(parts)
                for rank, time_s in zip(ranks[n::PROCESSES], part, strict=True)
            }
        took_s = time.monotonic() - began_s
        waited, done = zip(*(times[rank.number] for rank in ranks if rank.reads), strict=True)
        agents = [child for child in psutil.Process().children() if AGENT in child.cmdline()]
        memory = max(agent.memory_info().rss for agent in agents) / 2**20
        name = f"{size} ranks on {hosts} hosts"
        return [
            figure(f"{name}: until all have read all", [took_s], "s"),
            figure(f"{name}: longest wait for a key", [max(waited)], "s"),
            figure(f"{name}: from the first to the last that has", [max(done) - min(done)], "s"),
            figure(f"{name}: from the driver", [there.sent_bytes / 2**20], "MiB"),
            figure(f"{name}: memory of an agent", [memory], "MiB"),
        ]
    finally:
        there.close()


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--slice", action="store_true", help="ranks of the first host alone read")
    arguments = parser.parse_args()
    sizes = [(4, 8)] if arguments.quick else [(8, 64)] if not arguments.slice else [(64, 8), (32, 32)]
    report([f for hosts, local in sizes for f in simulate(hosts, local, arguments.slice)], arguments.json)
