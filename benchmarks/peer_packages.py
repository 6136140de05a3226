"""Peers that are packages: accelerate, lightning, deepspeed and torchft, in a folder of their own.

They are optional; a peer that is not installed is left out. To install them, next to what .venv has:

    DS_BUILD_OPS=0 .venv/bin/pip install --no-deps --no-build-isolation --target build/peers -r benchmarks/peers.txt

Another folder than build/peers is used if the variable BENCHMARK_PEERS names it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("accelerate", "lightning", "deepspeed", "torchft")
_DEFAULT = Path(__file__).parents[1] / "build" / "peers"


def folder() -> str:
    return os.environ.get("BENCHMARK_PEERS") or str(_DEFAULT)


def use_packages() -> None:
    """Make the packages importable in this process, after those of .venv."""
    if folder() not in sys.path:
        sys.path.append(folder())


def is_installed(peer: str) -> bool:
    """Return whether the package of a peer, such as deepspeed_zero2, is there; say so if it is not."""
    package = peer.partition("_")[0]
    if package not in PACKAGES or PathFinder.find_spec(package, [*sys.path, folder()]) is not None:
        return True
    print(f"{peer} is left out: {package} is not installed; see benchmarks/peer_packages.py", file=sys.stderr)
    return False
