"""A rank that joins a job of `hvdtrain launch`, prints where its store is, and leaves when the file `go` is there."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from hvdtrain.runtime.channel import BEAT_S, VARIABLE, Channel

channel = Channel(socket.socket(fileno=int(os.environ[VARIABLE])))


def beat(number: int) -> None:
    while channel.send("alive", round=number, step=0, idle_s=0.0, waiting=False):
        time.sleep(BEAT_S)


def main() -> None:
    channel.send("join", after=0, why="started", text="", step=0)
    for message in channel.messages():
        if message["type"] == "round":
            threading.Thread(target=beat, args=(message["round"],), daemon=True).start()
            print(f"STORE {message['store']}", flush=True)
            while not Path("go").exists():
                time.sleep(0.05)
            channel.send("leaving", why="finished")
            return


main()
