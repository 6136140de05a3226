"""A rank that joins a job of `hvdtrain launch`, does one thing and leaves: ``python visiting_rank.py WHAT [WORD...]``.

WHAT: ``argv`` prints the words and the rank's folder as JSON; ``store`` prints where the job's store is, and waits for
the file ``go``; ``burst`` writes much output, and ends before all of it can be read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from hvdtrain.runtime.channel import VARIABLE, Channel

channel = Channel(socket.socket(fileno=int(os.environ[VARIABLE])))
channel.send("join", after=0, why="started", text="", step=0)
place = next(message for message in channel.messages() if message["type"] == "round")
if sys.argv[1] == "argv":
    print("ARGV", json.dumps({"argv": sys.argv[2:], "cwd": str(Path.cwd())}), flush=True)
elif sys.argv[1] == "store":
    print(f"STORE {place['store']}", flush=True)
    while not Path("go").exists():
        time.sleep(0.05)
channel.send("leaving", why="finished")
if sys.argv[1] == "burst":
    os.write(1, "".join(f"{number}\n" for number in range(5000)).encode() + b"the last words\n")
    os._exit(0)
