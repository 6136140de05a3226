"""Conversations as samples of a fixed length: several whole ones each, with marks of first and counted tokens.

trl's packing is not used: it makes a dataset of lists in memory and on the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvdtrain.task.chat_encoder import ChatEncoder, chat_files
from hvdtrain.task.conversations import read_conversations
from hvdtrain.task.text_sources import Source, TextFile
from hvdtrain.task.token_loss import COUNTED, FIRST, MARKS

if TYPE_CHECKING:
    from hvdtrain.task.chat_encoder import Encoded
    from hvdtrain.task.encode import Encoder, Ids

_FORMAT = 1


def chat_source(files: Sequence[TextFile], encoder: Encoder, heldout: float, seq_len: int) -> Source:
    """Make a source of samples, each of seq_len + 1 ids with marks.

    The fraction `heldout` of the conversations is held out, evenly spread. A longer conversation loses its end. One
    without a counted token is left out.
    """
    tokenizer = chat_files(encoder)
    digest = hashlib.sha256()
    for part, content in sorted(tokenizer.items()):
        digest.update(f"{part} {len(content)} ".encode() + content)
    rows = _Rows(files, ChatEncoder(tokenizer), heldout, seq_len + 1)
    return Source(
        name=files[0].name if len(files) == 1 else f"{len(files)} files",
        identity=[
            "chat", _FORMAT, seq_len, digest.hexdigest(), *([str(f.path), f.size_bytes, f.changed_ns] for f in files)
        ],
        train=lambda: rows.ids(held=False),
        heldout=lambda: rows.ids(held=True),
        vocabulary=lambda: rows.encoder.vocabulary() << MARKS,
        tokenizer=lambda: tokenizer,
        end=lambda: None,
        note=rows.note,
    )  # fmt: skip


@dataclass
class _Rows:
    files: Sequence[TextFile]
    encoder: ChatEncoder
    heldout: float
    length: int
    truncated: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    used: int = field(default=0, init=False)

    def note(self) -> str:
        """Return what was left out, after all conversations have been read."""
        text = f"{self.used:,} conversations"
        if self.truncated:
            text += f", {self.truncated:,} of them truncated to {self.length:,} tokens"
        if self.dropped:
            text += f"; {self.dropped:,} without a token of the assistant are left out"
        return text

    def ids(self, *, held: bool) -> Iterator[Ids]:
        """Yield samples of conversations that are held out, or of the others: (length,)."""
        import numpy as np

        row: list[int] = []
        for one in self._encoded(held):
            if len(row) + len(one.ids) > self.length:
                yield np.asarray(_padded(row, self.length), np.int64)
                row = []
            row += [id_ << MARKS | (COUNTED if c else 0) for id_, c in zip(one.ids, one.counted, strict=True)]
            row[-len(one.ids)] |= FIRST
        if row:
            yield np.asarray(_padded(row, self.length), np.int64)

    def _encoded(self, held: bool) -> Iterator[Encoded]:
        for number, conversation in enumerate(read_conversations(file.path for file in self.files)):
            if (int((number + 1) * self.heldout) > int(number * self.heldout)) != held:
                continue
            whole = self.encoder.encode(conversation)
            kept: Any = type(whole)(whole.ids[: self.length], whole.counted[: self.length])
            if any(kept.counted):
                self.used += 1
                self.truncated += len(whole.ids) > self.length
                yield kept
            else:
                self.dropped += 1


def _padded(row: list[int], length: int) -> list[int]:
    """Fill a sample with id 0 as one more document, without a loss."""
    padding = length - len(row)
    return row + ([FIRST] + [0] * (padding - 1) if padding else [])
