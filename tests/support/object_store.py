"""A real S3 server on this machine: SeaweedFS, with two users. One may only read."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.launch import TIMEOUT_S, program

BUCKET = "bucket"
_START_S = 60.0
USERS = {"writer": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"]}


class S3Server:
    """`weed server` on ports of 127.0.0.1 that were free, with its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, _free_ports(4)
        (folder / "data").mkdir()
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": name}], "actions": actions}
            for name, actions in USERS.items()
        ]
        (folder / "users.json").write_text(json.dumps({"identities": identities}))
        self._process: subprocess.Popen[bytes] | None = None

    def environment(self, user: str = "writer") -> dict[str, str]:
        """What libraries of S3 read, to reach it as this user."""
        url = f"http://127.0.0.1:{self._ports[0]}"
        keys = {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": user}
        return {**keys, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}

    def start(self) -> None:
        """Start it, and wait until it answers."""
        import fsspec

        s3, master, volume, filer = self._ports
        options = {
            "dir": self._folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "filer.port": filer,
            "s3.port": s3,
            "s3.config": self._folder / "users.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        words = [f"-{name}={value}" for name, value in options.items()]
        patience = {"connect_timeout": 5, "read_timeout": 5, "retries": {"max_attempts": 0}}
        end, again = time.monotonic() + TIMEOUT_S / 2, 0.0
        while time.monotonic() < end:
            if self._process is not None and time.monotonic() > again:  # a start can hang, after a kill above all
                self.kill()
            if self._process is None or self._process.poll() is not None:
                again = time.monotonic() + _START_S
                with (self._folder / "log").open("ab") as log:
                    command = [program("weed"), "server", *words, "-s3"]
                    self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
            with suppress(Exception):  # it does not answer yet, in one of several ways
                system = fsspec.filesystem(
                    "s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=patience
                )
                system.makedirs(BUCKET, exist_ok=True)
                system.pipe_file(f"{BUCKET}/ready", b"")
                return
            time.sleep(0.2)
        raise RuntimeError((self._folder / "log").read_text()[-2000:])

    def kill(self) -> None:
        """Kill it. Its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _free_ports(count: int) -> list[int]:
    """Free ports. The port 10,000 above each is free, too: the server talks to itself there."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 22_000)  # both are below those that the kernel gives to clients
        with suppress(OSError), ExitStack() as stack:
            for each in (port, port + 10_000):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            found.append(port)
    return found


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run the server, and let libraries of this process reach it as the user who may write."""
    program("weed")
    server, before = S3Server(folder), dict(os.environ)
    os.environ.update(server.environment())
    try:
        server.start()
        yield server
    finally:
        server.kill()
        os.environ.clear()
        os.environ.update(before)
