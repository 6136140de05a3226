"""Render `launchers/Dockerfile`: the image of an MPIJob. Pure."""

from __future__ import annotations

from hvdtrain.install.venv import EXTRAS
from hvdtrain.launch.render import fill
from hvdtrain.launch.targets.mpijob import IMAGE

BASE = "debian:12.11-slim"


def render_dockerfile() -> str:
    """Return the Dockerfile; its build context is the root of the project."""
    return fill("Dockerfile.j2", image=IMAGE, base=BASE, extras=EXTRAS)
