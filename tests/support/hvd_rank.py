"""A rank with real Horovod and no trainer: sums ones, and ends some steps after round ROUNDS has begun.

    python hvd_rank.py ROUNDS [kill:RANK:STEP [MIB]]

The file HVD_RANK_MARK says that a rank was killed already. MIB: so many, which the rank that is killed broadcasts when
it is killed.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.runtime.channel import VARIABLE, Channel

ROUNDS = int(sys.argv[1])
KILL = sys.argv[2].split(":")[1:] if len(sys.argv) > 2 else None
AMID = torch.ones(int(sys.argv[3]) << 18) if len(sys.argv) > 3 else None
KILLED_AFTER_S = 0.1

channel = Channel(socket.socket(fileno=int(os.environ[VARIABLE])))
inbox: queue.Queue[dict[str, Any]] = queue.Queue()
told = {"round": 0, "step": 0}


def listen() -> None:
    for message in channel.messages():
        inbox.put(message)
    os._exit(77)


def beat() -> None:
    while channel.send("alive", round=told["round"], step=told["step"], idle_s=0.0, waiting=False):
        threading.Event().wait(1.0)


def enter(message: dict[str, Any]) -> None:
    numbers = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    os.environ.update({f"HOROVOD_{name.upper()}": str(message[name]) for name in numbers})
    os.environ.update(
        HOROVOD_HOSTNAME=message["host"],
        HOROVOD_GLOO_RENDEZVOUS_ADDR=message["store"],
        HOROVOD_GLOO_RENDEZVOUS_PORT="0",
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(message["timeout_s"]),
    )
    if message["interface"]:
        os.environ["HOROVOD_GLOO_IFACE"] = message["interface"]
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (message["rank"], message["size"])
    assert (hvd.local_rank(), hvd.local_size()) == (message["local_rank"], message["local_size"])


def kill(mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def work() -> str:
    """Train in the round; why it ended."""
    start = hvd.allreduce(torch.tensor(float(told["step"])), op=hvd.Max, name=f"start{told['round']}")
    told["step"] = int(start)
    first = Path(os.environ["HVD_RANK_MARK"])
    until = told["step"] + 20 if told["round"] >= ROUNDS else sys.maxsize
    while told["step"] < until:
        if KILL and str(told["step"]) == KILL[1] and not first.exists():
            mine = str(hvd.rank()) == KILL[0]
            if AMID is None and mine:
                kill(first)
            elif AMID is not None:
                if mine:
                    threading.Timer(KILLED_AFTER_S, kill, [first]).start()
                hvd.broadcast_(AMID, int(KILL[0]), name="amid")
        changed = not inbox.empty() and inbox.queue[0]["type"] == "changed"
        both = hvd.allreduce(torch.tensor([1.0, float(changed)]), op=hvd.Sum, name="step")
        assert both[0] == hvd.size()
        told["step"] += 1
        if both[1]:
            return "changed"
    return "finished"


def main() -> None:
    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=beat, daemon=True).start()
    why, text = "started", ""
    while True:
        channel.send("join", after=told["round"], why=why, text=text, step=told["step"])
        while (message := inbox.get())["type"] not in ("round", "end"):
            pass
        if message["type"] == "end":
            return
        told["round"] = message["round"]
        enter(message)
        print(f"round {message['round']}: rank {hvd.rank()} of {hvd.size()} at {told['step']}", flush=True)
        try:
            why, text = work(), ""
        except hvd.HorovodInternalError as error:
            why, text = "failed", str(error)[:80]
        if why == "finished":
            channel.send("leaving", why=why)
            hvd.shutdown()
            return
        hvd.shutdown()


main()
