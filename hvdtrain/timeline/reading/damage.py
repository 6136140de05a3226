"""What could not be read from a Timeline: counts, and a sentence for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdtrain.timeline.wording import counted

_EXCERPT_BYTES = 40


@dataclass
class Damage:
    """Counts of one file.

    Attributes:
        places: stretches of bytes that were skipped.
        skipped_bytes: their total size.
        first: offset and text of the first one.
        last_end: the offset after the last one.
        foreign: events of other programs.
        backwards, orphans, still_open, unnamed: see `lines`.
        notes: other lines.
    """

    places: int = 0
    skipped_bytes: int = 0
    first: tuple[int, bytes] = (0, b"")
    last_end: int = -1
    foreign: int = 0
    backwards: int = 0
    orphans: int = 0
    still_open: int = 0
    unnamed: int = 0
    notes: list[str] = field(default_factory=list)

    def skip(self, offset: int, text: bytes) -> None:
        """Count bytes without an event of Horovod; adjacent ones are one place."""
        if not self.places:
            self.first = (offset, text[:_EXCERPT_BYTES])
        self.places += offset != self.last_end
        self.skipped_bytes += len(text)
        self.last_end = offset + len(text)

    def lines(self, file_bytes: int) -> list[str]:
        """Return a sentence for each kind of damage; none if everything was read."""
        lines = list(self.notes)
        is_truncated = self.places > 0 and self.last_end == file_bytes
        if inside := self.places - is_truncated:
            where = f"byte {self.first[0]}, {self.first[1].decode('utf-8', 'replace')!r}"
            lines.append(f"{counted(inside, 'damaged place')} skipped ({self.skipped_bytes} bytes), first {where}")
        if is_truncated:
            lines.append("the file ends in the middle of an event, as after a killed job")
        counts = (
            (self.orphans, "end event", "without a begin event ignored: begun before the trace"),
            (self.still_open, "begin event", "without an end event ignored: still open"),
            (self.backwards, "span", "ignored: the end is before the beginning"),
            (self.unnamed, "tensor", "without a name: listed by number"),
        )
        return lines + [f"{counted(number, noun)} {what}" for number, noun, what in counts if number]
