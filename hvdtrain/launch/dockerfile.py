"""The text of `launchers/Dockerfile`: the image that an MPIJob takes. Pure."""

from __future__ import annotations

from hvdtrain.install.venv import EXTRAS
from hvdtrain.launch.render import fill
from hvdtrain.launch.targets.mpijob import IMAGE

BASE = "debian:12.11-slim"


def render_dockerfile() -> str:
    """Write the Dockerfile; its context is the root of the project."""
    return fill("Dockerfile.j2", image=IMAGE, base=BASE, extras=EXTRAS)
