"""Names of tensors in a Timeline. Horovod writes them without escaping, so a name may look like JSON or like events."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdtrain.timeline.reading.events import LONGEST_BYTES

HEAD = b'{"name": "process_name"'
"""The first bytes of a tensor's metadata."""

_OPENING = re.compile(rb'\{"name": "process_name", "ph": "M", "pid": (\d{1,8}), "args": \{"name": "')
_CLOSING = b'"}},\n{"name": "process_sort_index", "ph": "M", "pid": %s, "args": {"sort_index": %s}},'
"""The bytes after a name, with the tensor's number. No name contains them by chance."""


def find_names(text: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Yield begin and end of each tensor's metadata, the tensor's number and its name."""
    at = text.find(HEAD)
    while at >= 0:
        end = at + 1
        if found := _match(text, at):
            pid, name, end = found
            yield at, end, pid, name.decode("utf-8", "replace")
        at = text.find(HEAD, end)


def unfinished_name(text: bytes, end: int) -> int:
    """Return where metadata begins that may continue after `end`; -1 if there is none."""
    head = text.rfind(HEAD, max(0, end - LONGEST_BYTES), end)
    found = _match(text, head) if head >= 0 else None
    return -1 if found and found[2] <= end else head


def _match(text: bytes, at: int) -> tuple[int, bytes, int] | None:
    opening = _OPENING.match(text, at)
    if opening is None:
        return None
    begin = opening.end()
    closing = _CLOSING % (opening[1], opening[1])
    end = text.find(closing, begin, begin + LONGEST_BYTES + len(closing))
    return None if end < 0 else (int(opening[1]), text[begin:end], end + len(closing))
