"""Wrong versions of the source: what the tests have to catch, whatever is moved between their tiers.

Each entry of the modules in `rooms` replaces one text, found exactly once in its file, by a plausible programming
mistake. `python -m tests.mutations` applies them one at a time and names the test that fails.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.mutations.mutation import Mutation

ROOMS = sorted(file.stem for file in (Path(__file__).parent / "rooms").glob("*.py"))
MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation for room in ROOMS for mutation in import_module(f"tests.mutations.rooms.{room}").MUTATIONS
)


def room_of(mutation: Mutation) -> str:
    """Return the room of the file that a mutation changes."""
    room, _, rest = mutation.file.partition("/")
    return room if rest else "leaves"
