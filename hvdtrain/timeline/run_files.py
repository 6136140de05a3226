"""The files of a run that may still grow: kept for a later reading, it reads only what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.observe.past_journal import JournalReader, JournalStart, sampled_steps
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.steps import StampReader, Start

_T = TypeVar("_T")


class RunFiles:
    """Reads a run's folder. With `grows`, lines that have not ended wait, and output of the job is left out."""

    def __init__(self, folder: Path, *, grows: bool = False) -> None:
        self.layout, self.grows = RunLayout(folder), grows
        self._journal = JournalReader(self.layout.journal)
        self._stamps = StampReader(self.layout.timeline.folder)
        self._past: list[JournalStart] = []
        self._steps: tuple[dict[int, Any], dict[int, Any]] = ({}, {})  # of the last reading, of this one
        self._kept: dict[str, tuple[Any, Any]] = {}

    def starts(self) -> tuple[list[JournalStart], list[Start]]:
        """Begin a reading: return the starts in the journal, and those with stamps."""
        past = self._journal.read(whole=self.grows)
        self._steps = (self._steps[1] if past is self._past else {}, {})  # offsets of another file mean nothing
        self._past = past
        return past, self._stamps.read(whole=self.grows)

    def steps(self, start: JournalStart, most: int) -> list[dict[str, Any]]:
        """Return steps of a start in the journal, as `sampled_steps`."""
        last, this = self._steps
        found = sampled_steps(self.layout.journal, start, most, last)
        if self.grows:
            this |= found
        return list(found.values())

    def unless_changed(self, name: str, paths: Iterable[Path], more: Any, read: Callable[[list[Path]], _T]) -> _T:
        """Return what `read` returns for files; with `grows`, its last result if neither they nor `more` changed."""
        found = sorted(paths)
        if not self.grows:
            return read(found)
        key = [more, *((path, (now := path.stat()).st_size, now.st_mtime_ns) for path in found)]
        if self._kept.get(name, (None,))[0] != key:
            self._kept[name] = key, read(found)
        return self._kept[name][1]  # type: ignore[no-any-return]
