"""A rank without torch and Horovod: speaks the channel, "trains" by counting, does as it is told on its command line.

    python fake_rank.py STEPS [KIND:RANK:STEP ...]

What it shall do at a step is said by KINDs. Each is done once by each rank, however often it is started again.
`raise`: exit with 1; `kill`: SIGKILL itself; `stop`: SIGSTOP itself; `hang`: do nothing more in the training thread,
and report that for long. All that is shared is in the folder FAKE_FOLDER: `log`, a line for each thing done;
`checkpoint`; the step of a round.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from hvdtrain.runtime.channel import VARIABLE, Channel, hold_lifeline

FOLDER = Path(os.environ["FAKE_FOLDER"])
STEPS = int(sys.argv[1])
DEEDS = [deed.split(":") for deed in sys.argv[2:]]

channel = Channel(socket.socket(fileno=int(os.environ[VARIABLE])))
send = channel.send
inbox: queue.Queue[dict] = queue.Queue()
state = {"round": 0, "step": -1, "idle_s": 0.0, "waiting": False}


def listen() -> None:
    for message in channel.messages():
        inbox.put(message)
    os._exit(77)  # nobody is there any more


def leave(code: int) -> None:
    """End at once: the usual way may wait for threads."""
    sys.stdout.flush()
    os._exit(code)


def beat() -> None:
    while True:
        send("alive", **state)
        time.sleep(0.2)


def log(text: str) -> None:
    with (FOLDER / "log").open("a") as file:
        file.write(text + "\n")


def act(rank: int, step: int) -> None:
    for kind, who, when in DEEDS:
        mark = FOLDER / f"done-{kind}-{who}-{when}"
        if (who, when) != (str(rank), str(step)) or mark.exists():
            continue
        mark.touch()
        log(f"{kind} rank={rank} step={step}")
        if kind == "raise":
            leave(1)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "hang":
            state["idle_s"] = 1e9
            threading.Event().wait()


def checkpoint() -> int:
    try:
        return int((FOLDER / "checkpoint").read_text())
    except (OSError, ValueError):
        return -1


def main() -> None:
    if hold_lifeline(os.environ):
        send("held")
    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=beat, daemon=True).start()
    why, text = "started", ""
    while True:
        state["waiting"] = True
        send("join", after=state["round"], why=why, text=text, step=state["step"])
        while (message := inbox.get())["type"] not in ("round", "end", "stop"):
            pass
        state["waiting"] = False
        if message["type"] != "round":
            log(f"{message['type']} pid={os.getpid()}")
            leave(0)
        state["round"] = message["round"]
        rank, size = message["rank"], message["size"]
        place = f"rank={rank} size={size} step={state['step']}"
        log(f"round {message['round']} {place} pid={os.getpid()} host={message['host']} if={message['interface']}")
        print(f"round {message['round']} rank {rank} of {size}", flush=True)
        if state["step"] < 0:
            state["step"] = max(0, checkpoint())
        why, text = train(rank, size)


def train(rank: int, size: int) -> tuple[str, str]:
    """Steps go by a shared file for all: the step that a round is at."""
    where = FOLDER / f"at-{state['round']}"
    if rank == 0:
        where.write_text(str(state["step"]))
    while True:
        try:
            message = inbox.get(timeout=0.02)
        except queue.Empty:
            message = {"type": ""}
        if message["type"] == "broken":
            return "failed", "HorovodInternalError"
        if message["type"] == "changed":
            return "changed", ""
        if message["type"] == "stop":
            send("leaving", why=message["signal"])
            leave(128 + signal.Signals[message["signal"]].value)
        if message["type"] == "end":
            leave(0)
        if rank == 0:
            act(rank, state["step"])
            state["step"] += 1
            (FOLDER / "checkpoint").write_text(str(state["step"]))
            where.write_text(str(state["step"]))
        else:
            reached = int(where.read_text() or 0) if where.exists() else state["step"]
            state["waiting"] = state["step"] >= reached
            while state["step"] < reached:
                act(rank, state["step"])
                state["step"] += 1
        if state["step"] >= STEPS:
            send("leaving", why="finished")
            log(f"finished rank={rank}")
            leave(0)


main()
