"""What of a Timeline could not be read, counted, and told in plain words."""

from __future__ import annotations

from dataclasses import dataclass, field

_EXCERPT_BYTES = 40


@dataclass
class Damage:
    """Counts of one file.

    Attributes:
        places: that were passed over.
        total_bytes: of them.
        first: where the first begins, and its text.
        last_end: where the last one ends.
        foreign: events of other programs.
        backwards: spans that end before they begin.
        orphans: ends without a beginning.
        still_open: beginnings without an end.
        unnamed: tensors without a name.
        notes: other lines.
    """

    places: int = 0
    total_bytes: int = 0
    first: tuple[int, bytes] = (0, b"")
    last_end: int = -1
    foreign: int = 0
    backwards: int = 0
    orphans: int = 0
    still_open: int = 0
    unnamed: int = 0
    notes: list[str] = field(default_factory=list)

    def pass_over(self, offset: int, text: bytes) -> None:
        """A place that holds no event of Horovod."""
        if not self.places:
            self.first = (offset, text[:_EXCERPT_BYTES])
        self.places += offset != self.last_end
        self.total_bytes += len(text)
        self.last_end = offset + len(text)

    def lines(self, file_bytes: int) -> list[str]:
        """In plain words; empty where all was read."""
        found = list(self.notes)
        broken_off = self.places > 0 and self.last_end == file_bytes
        if inside := self.places - broken_off:
            where = f"byte {self.first[0]}, {self.first[1].decode('utf-8', 'replace')!r}"
            found.append(
                f"{_count(inside, 'damaged place')} passed over, {self.total_bytes} bytes; the first at {where}"
            )
        if broken_off:
            found.append("the file breaks off in the middle of an event, as that of a killed job does")
        if self.orphans:
            found.append(f"{_count(self.orphans, 'end')} without a beginning left out: of what was under way before")
        if self.still_open:
            found.append(f"{_count(self.still_open, 'beginning')} without an end left out: of what was under way then")
        if self.backwards:
            found.append(f"{_count(self.backwards, 'span')} left out that ended before it began")
        if self.unnamed:
            found.append(f"{_count(self.unnamed, 'tensor')} without a name, called by the number in the file")
        return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
