"""What a mutation is: one planted mistake."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        file: path below ``hvdtrain/``.
        old: text that occurs exactly once in the file.
        new: what replaces it.
        breaks: what is wrong then.
        tests: files or folders of tests that should catch it.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


def mutation(file: str, old: str, new: str, breaks: str, *tests: str) -> Mutation:
    """Return a `Mutation`."""
    return Mutation(file, old, new, breaks, tests)
