"""A rank that trains nothing: it writes much output at once, and ends before all of it can be read."""

from __future__ import annotations

import os
import socket

from hvdtrain.runtime.channel import VARIABLE, Channel

LINES = 5000
LAST = "the last words"

if __name__ == "__main__":
    channel = Channel(socket.socket(fileno=int(os.environ[VARIABLE])))
    channel.send("join", after=0, why="started", text="", step=0)
    next(message for message in channel.messages() if message["type"] == "round")
    channel.send("leaving", why="finished")
    os.write(1, "".join(f"{number}\n" for number in range(LINES)).encode() + LAST.encode() + b"\n")
    os._exit(0)
