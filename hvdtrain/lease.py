"""An exclusive claim where there are no locks: a file or an object that its holder rewrites every few seconds."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.files import read_object
from hvdtrain.programs import read_stat

BEAT_S = 3.0
"""Between two writes of a holder."""

_SILENT_BEATS = 4  # beats without a change after which a holder on another host counts as dead


class Place(Protocol):
    """Where a claim is: a file, or an object of a store."""

    def read(self) -> dict[str, Any]:
        """Return the content of the newest claim; nothing if it cannot be read."""

    def write(self, content: dict[str, Any]) -> None:
        """Replace the own claim. Errors: OSError."""

    def remove(self) -> None:
        """Remove the own claim. Errors: OSError."""


class Lease:
    """A lease, held until `release` or the end of the process. The place has `who`, which identifies the holder."""

    def __init__(self, place: Place, who: dict[str, Any], beat_s: float | None = None) -> None:
        self._place = place
        self._who = who
        self._beat_s = beat_s  # None for `BEAT_S`
        self.lost = False  # another process has taken it, because this one was suspended or the file system hung
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lease."""
        self._released.set()
        self._thread.join()
        if self._place.read().get("nonce") == self._who["nonce"]:
            with suppress(OSError):
                self._place.remove()

    def check(self) -> bool:
        """Check whether the lease is lost."""
        self.lost = self.lost or self._place.read().get("nonce") not in (self._who["nonce"], None)
        return self.lost

    def _beat(self) -> None:
        beats = 0
        while not self._released.wait(self._beat_s or BEAT_S):
            if self.check():
                return  # it must not take the lease back
            beats += 1
            with suppress(OSError):
                self._place.write({**self._who, "beats": beats})


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        return read_object(self._path)

    def write(self, content: dict[str, Any]) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{content['nonce']}")
        temporary.write_text(json.dumps(content))
        temporary.replace(self._path)

    def remove(self) -> None:
        self._path.unlink()


def describe_holder() -> dict[str, Any]:
    """Return what identifies this process in a claim."""
    return {"nonce": secrets.token_hex(8), **_where(), "pid": os.getpid(), "began": _began(os.getpid())}


def take_lease(path: Path, wait: Callable[[float], None] = time.sleep) -> Lease | None:
    """Take the lease of the file `path`; None where a living process holds it. Errors: OSError if it cannot be written.

    A holder on this host is looked up among the processes. Of one elsewhere only the file is visible: it is observed
    for up to `_SILENT_BEATS` * `BEAT_S` seconds, only by its content, as the clocks of two hosts may differ.
    """
    found = read_object(path)
    if path.exists():
        if holder_lives(found, lambda: read_object(path), wait) and path.exists():
            return None
        stale = path.with_name(f"{path.name}.stale-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            path.rename(stale)
            if read_object(stale) != found:  # another process also found it stale, was faster, and this is its new file
                with suppress(OSError):  # its holder rewrites it at its next beat
                    path.hardlink_to(stale)
                stale.unlink()
                return None
            stale.unlink()
    who = describe_holder()
    try:
        with path.open("x") as file:
            file.write(json.dumps(who))
    except FileExistsError:
        return None
    return Lease(_File(path), who)


def holder_lives(
    holder: dict[str, Any],
    read: Callable[[], dict[str, Any]],
    wait: Callable[[float], None],
    beat_s: float | None = None,
) -> bool:
    """Return whether the process that a claim describes lives; `read` reads the claim again. See `take_lease`."""
    if holder and all(holder.get(key) == value for key, value in _where().items()):
        return holder.get("began") is not None and _began(int(holder.get("pid", 0))) == holder["began"]
    for _ in range(_SILENT_BEATS):
        wait(beat_s or BEAT_S)
        if read() != holder:
            return True
    return False


def _where() -> dict[str, str]:
    """Identify the boot of this host and the container: process numbers are comparable where both are equal."""
    found = {"boot": "", "container": ""}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["container"] = str(Path("/proc/self/ns/pid").readlink())
    return found


def _began(pid: int) -> str | None:
    """Return the start of a process by the kernel's count, which tells two processes with the same number apart."""
    with suppress(OSError):
        stat = read_stat(pid)
        return None if stat.state in "ZX" else str(stat.start_ticks)
    return None
