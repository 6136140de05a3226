"""A process that serves as the elastic driver of stock Horovod does: prints its port, ends when its stdin does."""

from __future__ import annotations

import sys

from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer


def main() -> None:
    """As launch_gloo_elastic (horovod/runner/gloo_run.py) starts it."""
    server = RendezvousServer()
    driver = ElasticDriver(server, FixedHosts({"localhost": 1}), min_num_proc=1, max_num_proc=1)
    print(server.start(create_rendezvous_handler(driver)), flush=True)
    sys.stdin.read()
    driver.stop()
    server.stop()


if __name__ == "__main__":
    main()
