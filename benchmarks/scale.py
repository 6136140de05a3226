"""The control plane of a job of up to thousands of ranks: our own driver, with simulated hosts.

The driver is the real one. Its agents are objects in the same process that answer as real ones do: a rank asks for a
place when it is started or when its round has broken, and gives a sign of life each second. The network, the agents'
processes and ssh are left out. `--busy` adds loops that take all cores meanwhile.

`scale/sent_gib_N`: what the driver's host, which sends most, sends of the addresses by which N ranks of Gloo find each
other; counted, by the code of agents and driver. `rendezvous.py` has real agents.

`scale/zero_padding_MODEL_N`: what N ranks hold, and send, where --parallel.shard divides gradients, relative to them;
computed from the shapes of Llama 7B and 70B and of DeepSeek-V3.

`scale/names_MODEL`: tensors that Horovod knows by name where their gradients are sent as int8, and each expert has
parameters of its own. Its response cache holds 1,024.

`scale/verify_s_N`, `scale/verify_bytes_N`: time of `hvdtrain verify data` for a million lines of a ledger of N ranks,
and its largest memory by line; by the real code, from files in memory.
"""

from __future__ import annotations

import heapq
import itertools
import math
import resource
import tempfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from common import Figure, busy, figure, options, report
from rendezvous import addresses, round_keys

from hvdtrain.compression.sizes import Bucket, shard_bucket_bytes
from hvdtrain.compression.table import parse
from hvdtrain.launch import driver as driver_module
from hvdtrain.launch.agent_link import Readers, Relay
from hvdtrain.launch.driver import Driver
from hvdtrain.launch.job import Limits
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.worker_plan import Starter, WorkerPlan
from hvdtrain.plan.buckets import assign
from hvdtrain.plan.shards import divide
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.channel import BEAT_S, encode_message

PER_HOST = 8
BUCKET_MIB = 8
"""The default between hosts."""
LINES = 1_000_000
"""Of a ledger."""
EXPERTS_DIM = 3
"""Dimensions of a tensor of experts."""
QUIET_S = 5.0
"""Of heartbeats alone, for the driver's share of a core."""


class Crowd:
    """All simulated agents and ranks. One thread delivers what they say."""

    def __init__(self) -> None:
        self.links: dict[str, FakeLink] = {}
        self.rounds: dict[int, int] = {}  # of each living worker, its round
        self.begun: dict[int, float] = {}  # by round, when its last rank was told
        self._due: list[tuple[float, int, FakeLink, dict[str, Any]]] = []
        self._lock = threading.Condition()
        self._order = itertools.count()
        self._over = False
        threading.Thread(target=self._deliver, daemon=True).start()

    def say(self, link: FakeLink, message: dict[str, Any], after_s: float = 0.0) -> None:
        """Deliver a message of an agent."""
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._order), link, message))
            self._lock.notify()

    def join(self, link: FakeLink, worker: int, why: str) -> None:
        """Ask for a place."""
        message = {"type": "join", "why": why, "after": self.rounds.get(worker, 0), "step": 0}
        self.rounds[worker] = 0
        self.say(link, {"type": "said", "worker": worker, "message": message})

    def close(self) -> None:
        """Deliver no more."""
        with self._lock:
            self._over = True
            self._lock.notify()

    def _deliver(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                while not self._over and (not self._due or self._due[0][0] > now):
                    self._lock.wait(self._due[0][0] - now if self._due else None)
                    now = time.monotonic()
                if self._over:
                    return
                _, _, link, message = heapq.heappop(self._due)
            if message["type"] == "beats":  # of an agent and its ranks
                link.inbox((link, {"type": "beat", "halted": {}, "busy": []}))
                for worker in [n for n in link.workers if n in self.rounds]:
                    alive = {"type": "alive", "round": self.rounds[worker], "step": 1, "idle_s": 0.0, "waiting": False}
                    link.inbox((link, {"type": "said", "worker": worker, "message": alive}))
                self.say(link, message, BEAT_S)
            else:
                link.inbox((link, message))


class FakeLink:
    """An agent as the driver sees it."""

    crowd: Crowd

    def __init__(self, host: str, argv: Any, environment: Any, inbox: Any) -> None:
        self.host, self.inbox, self.workers = host, inbox, set[int]()
        self.store, self.address, self.interface, self.networks = "", "127.0.0.1", "lo", {"n": "lo"}
        self.crowd.links[host] = self

    def start(self) -> None:
        """Nothing to start."""

    def send(self, kind: str, **facts: Any) -> None:
        """Do as the driver says."""
        if kind == "hello":
            place = {"address": "127.0.0.1", "interface": "lo", "networks": self.networks}
            self.crowd.say(self, {"type": "ready", "pid": 1, "store": "s", **place})
            self.crowd.say(self, {"type": "beats"}, BEAT_S)
        elif kind == "start":
            self.workers.add(facts["worker"])
            self.crowd.join(self, facts["worker"], "started")
        elif kind == "kill":
            self._exit(facts["worker"], -9)
        elif kind == "tell" and facts["worker"] in self.crowd.rounds:
            if facts["what"] == "round":
                number = facts["facts"]["round"]
                self.crowd.rounds[facts["worker"]], self.crowd.begun[number] = number, time.monotonic()
            elif facts["what"] in ("broken", "changed"):
                self.crowd.join(self, facts["worker"], "failed" if facts["what"] == "broken" else "changed")
            elif facts["what"] in ("end", "stop"):
                self._exit(facts["worker"], 0)

    def _exit(self, worker: int, code: int) -> None:
        self.workers.discard(worker)
        if self.crowd.rounds.pop(worker, None) is not None:
            self.crowd.say(self, {"type": "exited", "worker": worker, "code": code})

    def write(self, data: bytes) -> None:
        """Values and beats of the driver are not simulated."""

    def close(self) -> None:
        """Nothing to close."""

    def kill(self) -> None:
        """Nothing to kill."""

    def wait(self, timeout_s: float = 0.0) -> None:
        """Nothing to wait for."""

    def ended(self) -> bool:
        """Whether it has ended."""
        return True


def simulate(size: int) -> list[Figure]:
    """Start a job, watch it for some seconds, kill a rank, and wait for the next round."""
    crowd = FakeLink.crowd = Crowd()
    hosts = {f"h{number}": PER_HOST for number in range(size // PER_HOST)}
    limits = Limits(start=size, least=2, most=size, cooldown_s=60.0)
    job = JobSpec(arguments=("x",), ranks=size, hosts=hosts, nodes=len(hosts))
    plan = WorkerPlan(job, ("x",), limits, hosts, local=frozenset({"h0"}), starter=Starter())
    driver = Driver(plan, lambda text, err: None)
    used = dict[str, float]()

    def drive() -> None:
        try:
            driver.run()
        finally:
            used["whole"] = time.thread_time()

    began, thread = time.monotonic(), threading.Thread(target=drive)
    thread.start()
    _until(lambda: crowd.begun.get(1) and sum(n == 1 for n in crowd.rounds.values()) == size)
    first_s = crowd.begun[1] - began
    clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    before = time.clock_gettime(clock)
    time.sleep(QUIET_S)
    share = (time.clock_gettime(clock) - before) / QUIET_S
    victim = crowd.links[f"h{len(hosts) - 1}"]
    lost, killed = next(iter(victim.workers)), time.monotonic()
    victim._exit(lost, -9)
    _until(lambda: 2 in crowd.begun and not _waiting(crowd))
    second_s = crowd.begun[2] - killed
    left = sum(number == max(crowd.rounds.values()) for number in crowd.rounds.values())
    driver.signal("SIGTERM")
    driver.signal("SIGTERM")
    thread.join(60.0)
    crowd.close()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        figure(f"scale/round_s_{size}", [first_s], "s"),
        figure(f"scale/new_round_s_{size}", [second_s], "s"),
        figure(f"scale/healthy_lost_{size}", [size - 1 - left], "ranks"),
        figure(f"scale/driver_cores_{size}", [share], "cores"),
        figure(f"scale/rss_mib_{size}", [rss], "MiB, with the simulated ranks"),
    ]


def sent(size: int) -> Figure:
    """Let the ranks of a round put their addresses; count what the driver sends to all hosts."""
    hosts, total = size // PER_HOST, 0

    def to_all(kind: str, **facts: Any) -> None:
        nonlocal total
        total += hosts * len(encode_message(kind, facts))

    def to_one(host: str, kind: str, **facts: Any) -> None:
        nonlocal total
        total += len(encode_message(kind, facts))

    keys = round_keys(hosts, PER_HOST)
    relay, readers = Relay(to_all, to_one), Readers(keys)
    relay.open(1, keys)
    for rank in range(size):
        host, own = divmod(rank, PER_HOST)
        for scope, number, ranks in (("global", rank, size), (f"cross_{own}", host, hosts)):
            relay.put(1, f"{scope}/rank_{number}", readers.divide(f"{scope}/rank_{number}", f"h{host}".encode()))
            relay.put(1, f"{scope}/{number}", readers.divide(f"{scope}/{number}", addresses(number, ranks)))
    relay.flush()
    return figure(f"scale/sent_gib_{size}", [total / 2**30], "GiB")


LAYERS: dict[str, tuple[int, Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]] = {
    "llama7b": (32, [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008), (4096,), (4096,)], [(32000, 4096)] * 2),
    "llama70b": (
        80,
        [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672), (8192,), (8192,)],
        [(32000, 8192)] * 2,
    ),
    "deepseekv3": (
        58,
        [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (256, 7168), (7168,), (7168,)]
        + [(2048, 7168)] * 2 + [(7168, 2048), (256, 4096, 7168), (256, 7168, 2048)],
        [(129280, 7168)] * 2,
    ),
}  # fmt: skip
"""Of each model: its number of layers, the shapes of one, and those outside of layers."""


def padding(model: str, size: int) -> Figure:
    """Divide a model's parameters, bucket by bucket."""
    layers, inside, outside = LAYERS[model]
    shapes = {str(number): shape for number, shape in enumerate([*inside] * layers + [*outside])}
    sizes = {name: (4 * math.prod(shape), 0) for name, shape in shapes.items()}
    total = sum(nbytes for nbytes, _ in sizes.values())
    limit = shard_bucket_bytes(BUCKET_MIB << 20, total, size, [])
    held = 0
    for number, bucket in enumerate(assign(sizes, limit, sizes).buckets):
        _, segment = divide([shapes[name] for name in bucket], size, 4, [False] * len(bucket), number)
        held += 4 * segment * size
    return figure(f"scale/zero_padding_{model}_{size}", [held / total], "ratio")


def names(model: str) -> Figure:
    """Count the collectives of a step; 8 ranks."""
    layers, inside, outside = LAYERS[model]
    single = [[shape[1:]] * shape[0] if len(shape) == EXPERTS_DIM else [shape] for shape in inside]
    shapes = dict(enumerate([*itertools.chain(*single)] * layers + [*outside]))
    made = assign({str(name): (4 * math.prod(shape), 0) for name, shape in shapes.items()}, BUCKET_MIB << 20)
    buckets = [[shapes[int(name)] for name in bucket] for bucket in made.buckets]
    count = sum(
        len(parse("int8").collectives(Bucket(each, "float32", sum(map(math.prod, each))), 8)) for each in buckets
    )
    return figure(f"scale/names_{model}", [count], "tensors")


def verified(size: int) -> list[Figure]:
    """Verify the ledger of a run of `size` ranks."""
    import numpy as np  # not before the memory of the driver is measured

    from hvdtrain.data.order import SampleOrder
    from hvdtrain.state.ledger import VERSION, StartHeader
    from hvdtrain.verify.data import verify_data

    steps, samples = LINES // size, 1 << 20
    batch, order = 2 * size, SampleOrder(samples, [], 3)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ledger = RunLayout(Path(folder)).ledger
        ledger.mkdir()
        for rank in range(size):
            header = StartHeader(0, "started", 0, 0, size, rank, "host", 3, batch, 2, samples, "data")
            lines = [orjson.dumps({"version": VERSION, **asdict(header)})]
            for step in range(steps):
                begin = step * batch + 2 * rank
                used = order.indices(np.arange(begin, begin + 2)).astype("<i8").tobytes()
                lines.append(orjson.dumps([0, rank, step + 1, [[begin, begin + 2]], zlib.crc32(used)]))
            with (ledger / f"host-{rank // PER_HOST}.jsonl").open("ab") as file:
                file.write(b"\n".join([b"", *lines]))
        began_s = time.perf_counter()
        assert not verify_data(Path(folder)).wrong
        took_s = time.perf_counter() - began_s
        tracemalloc.start()
        verify_data(Path(folder))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    each = [most / (steps * size)]
    return [figure(f"scale/verify_s_{size}", [took_s], "s"), figure(f"scale/verify_bytes_{size}", each, "bytes")]


def _waiting(crowd: Crowd) -> bool:
    return any(number == 0 for number in list(crowd.rounds.values()))


def _until(is_so: Any, limit_s: float = 240.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("the job did not get so far")
        time.sleep(0.01)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--ranks", default="64,256,1024", help="numbers of ranks (default: 64,256,1024)")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside (default: 0)")
    arguments = parser.parse_args()
    driver_module.AgentLink = FakeLink  # type: ignore[assignment,misc]
    sizes = [64] if arguments.quick else [int(text) for text in arguments.ranks.split(",")]
    with busy(arguments.busy):
        found = [each for size in sizes for each in (*simulate(size), sent(size))]
        found += [padding(model, size) for size in sizes for model in LAYERS] + [names(model) for model in LAYERS]
        report([*found, *(each for size in sizes for each in verified(size))], arguments.json)
