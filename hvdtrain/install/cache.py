"""What the cache holds: tokenized texts, converted models, wheels of Horovod. All are made again when missing."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.install.build_probe import cache_folder, is_mine, substitute_folder

_DAY_S = 86_400.0


@dataclass(frozen=True)
class CacheEntry:
    """A folder in the cache."""

    path: Path
    size_bytes: int  # of its files
    used_s: float  # time of the last use, in seconds since the epoch
    about: str  # what it holds, in a few words


def cache_entries(environ: Mapping[str, str]) -> list[CacheEntry]:
    """List the folders of the cache, and those that a process without access to it has made elsewhere."""
    own, substitute = cache_folder(environ), substitute_folder()
    places = [own / "corpus", own / "models", own / "horovod"]
    places += [place for place in (substitute / "corpus", substitute / "models") if is_mine(place)]
    return [entry for place in places for entry in _entries(place)]


def prune(entries: Sequence[CacheEntry], days: float, now_s: float | None = None) -> list[CacheEntry]:
    """Remove the folders that were not used for `days` days, and return them. Errors: OSError."""
    before_s = (time.time() if now_s is None else now_s) - days * _DAY_S
    old = [entry for entry in entries if entry.used_s <= before_s]
    for entry in old:
        doomed = entry.path.with_name(f"{entry.path.name}.tmp-removed")  # a folder without a part would look whole
        shutil.rmtree(doomed, ignore_errors=True)
        entry.path.rename(doomed)
        shutil.rmtree(doomed)
        for suffix in (".lock", ".log"):
            entry.path.with_name(f"{entry.path.name}{suffix}").unlink(missing_ok=True)
    return old


def _entries(place: Path) -> Iterator[CacheEntry]:
    folders = sorted(place.iterdir()) if place.is_dir() else []
    for folder in folders:
        # A folder of a build under way; a killed one is removed by the next build.
        if folder.is_dir() and not folder.is_symlink() and folder.suffix != ".build":
            with suppress(OSError):  # another process has just removed it
                sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
                yield CacheEntry(folder, sum(sizes), folder.stat().st_mtime, _about(folder))


def _about(folder: Path) -> str:
    if folder.parent.name == "horovod":
        return "source of Horovod" if folder.name == "sdist" else "wheel of Horovod"
    try:
        if folder.parent.name == "models":
            return f"weights of {json.loads((folder / 'source.json').read_text(encoding='utf-8'))['of']}"
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        return f"{about['train'] + about['heldout']:,} tokens"
    except (OSError, ValueError, KeyError, TypeError):
        return "incomplete"
