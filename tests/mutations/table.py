"""Wrong versions of the source: what the tests have to catch, whatever is moved between their tiers.

The modules in `rooms` replace one text at a time, found exactly once in its file, by a plausible programming mistake.
`python -m tests.mutations` applies them and names the test that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

Table = dict[tuple[str, ...], dict[str, tuple[str, str]]]
"""By a file below ``hvdtrain/`` and the tests that should catch it: what each mistake breaks, the old text, the new."""


@dataclass(frozen=True)
class Mutation:
    """One planted mistake.

    Attributes:
        file: path below ``hvdtrain/``.
        tests: files or folders of tests that should catch it.
        breaks: what is wrong then.
        old: text that occurs exactly once in the file.
        new: what replaces it.
    """

    file: str
    tests: tuple[str, ...]
    breaks: str
    old: str
    new: str


ROOMS = sorted(file.stem for file in (Path(__file__).parent / "rooms").glob("*.py"))


def _read(table: Table) -> list[Mutation]:
    return [
        Mutation(file, tuple(tests), breaks, *texts)
        for (file, *tests), mistakes in table.items()
        for breaks, texts in mistakes.items()
    ]


MUTATIONS = [m for room in ROOMS for m in _read(import_module(f"tests.mutations.rooms.{room}").MUTATIONS)]


def room_of(mutation: Mutation) -> str:
    """Return the room of the file that a mutation changes."""
    room, _, rest = mutation.file.partition("/")
    return room if rest else "leaves"
