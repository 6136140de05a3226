"""What ranks tell each other while Horovod starts: the addresses of a round, kept by the driver. No I/O."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass

FOUND, ABSENT, GONE = 200, 404, 410
MOST_KEYS = 1 << 18
"""Of a round: three contexts of 512 ranks, each with a key for each."""


@dataclass(frozen=True)
class Answer:
    """To a request of a host's agent. `value`: as it was put, which is text without meaning here."""

    host: str
    request: int
    status: int
    value: str = ""


def encoded(keys: dict[str, str]) -> dict[str, str]:
    """Values as agents put them."""
    return {key: b64encode(value.encode()).decode() for key, value in keys.items()}


class RoundStore:
    """The keys of the newest round; those of others are gone, so that a rank that is late learns it at once."""

    def __init__(self) -> None:
        self._round = 0
        self._keys: dict[str, str] = {}
        self._asking: dict[str, list[tuple[str, int]]] = {}

    def open(self, number: int, keys: dict[str, str]) -> list[Answer]:
        """Begin a round with `keys`; who still asks for the one before is refused."""
        answers = self.close(self._round)
        self._round, self._keys = number, dict(keys)
        return answers

    def close(self, number: int) -> list[Answer]:
        """Drop a round's keys."""
        if number != self._round:
            return []
        asking = [asker for askers in self._asking.values() for asker in askers]
        self._round, self._keys, self._asking = 0, {}, {}
        return [Answer(host, request, GONE) for host, request in asking]

    def put(self, number: int, key: str, value: str) -> list[Answer]:
        """Keep a value, and answer who waits for it."""
        if number != self._round or len(self._keys) >= MOST_KEYS:
            return []
        self._keys[key] = value
        return [Answer(host, request, FOUND, value) for host, request in self._asking.pop(key, [])]

    def get(self, host: str, request: int, number: int, key: str) -> list[Answer]:
        """Answer a request, now or when the key is put."""
        if number != self._round:
            return [Answer(host, request, GONE)]
        if key in self._keys:
            return [Answer(host, request, FOUND, self._keys[key])]
        self._asking.setdefault(key, []).append((host, request))
        return []
