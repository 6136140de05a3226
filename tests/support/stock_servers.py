"""A process that serves as the driver of stock Horovod does: prints its ports, ends when its stdin does."""

from __future__ import annotations

import sys

from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import KVStoreServer, RendezvousServer


def main() -> None:
    """As launch_gloo_elastic (horovod/runner/gloo_run.py) and horovod.run() start them."""
    elastic, functions = RendezvousServer(), KVStoreServer(verbose=False)
    driver = ElasticDriver(elastic, FixedHosts({"localhost": 1}), min_num_proc=1, max_num_proc=1)
    print(elastic.start(create_rendezvous_handler(driver)), functions.start_server(), flush=True)
    sys.stdin.read()
    driver.stop()
    elastic.stop()
    functions.shutdown_server()


if __name__ == "__main__":
    main()
