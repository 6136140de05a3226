"""A claim that holds where a file system has no locks: a file that its holder writes anew again and again. A leaf."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.processes import read_stat

BEAT_S = 3.0
"""Between two times that a holder writes its file."""

_SILENT_BEATS = 4
"""A holder that cannot be looked at is gone after so many beats without a change."""


class Lease:
    """A lease that is held, until `release` or the end of the process.

    Args:
        path: the file, which is this holder's.
        who: what it holds.

    Attributes:
        lost: another has taken it, as it saw no beat of this process: that was suspended, or the file system hung.
    """

    def __init__(self, path: Path, who: dict[str, Any]) -> None:
        self._path = path
        self._who = who
        self.lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others have it."""
        self._released.set()
        self._thread.join()
        if _read(self._path).get("nonce") == self._who["nonce"]:
            with suppress(OSError):
                self._path.unlink()

    def look(self) -> bool:
        """Whether it is lost by now."""
        self.lost = self.lost or _read(self._path).get("nonce") not in (self._who["nonce"], None)
        return self.lost

    def _beat(self) -> None:
        beats = 0
        while not self._released.wait(BEAT_S):
            if self.look():
                return  # it must not take it back
            beats += 1
            temporary = self._path.with_name(f"{self._path.name}.{self._who['nonce']}")
            with suppress(OSError):
                temporary.write_text(json.dumps({**self._who, "beats": beats}))
                temporary.replace(self._path)


def take_lease(path: Path, wait: Callable[[float], None] = time.sleep) -> Lease | None:
    """Take the lease of the file `path`, or None where somebody who lives holds it.

    A holder on this host is looked for among the processes. Of one elsewhere only the file is seen: it is watched for
    up to `_SILENT_BEATS` * `BEAT_S` seconds, by its content alone, as the clocks of two hosts may differ.

    Args:
        path: of the file.
        wait: for so many seconds.

    Errors:
        OSError: the file cannot be written.
    """
    found = _read(path)
    if path.exists():
        if _lives(found, path, wait):
            return None
        stale = path.with_name(f"{path.name}.stale-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            path.rename(stale)
            if _read(stale) != found:  # of two who find it stale the other was faster, and this is the new one
                with suppress(OSError):  # its holder writes it anew at its next beat
                    path.hardlink_to(stale)
                stale.unlink()
                return None
            stale.unlink()
    who = {"nonce": secrets.token_hex(8), **_where(), "pid": os.getpid(), "began": _began(os.getpid())}
    try:
        with path.open("x") as file:
            file.write(json.dumps(who))
    except FileExistsError:
        return None
    return Lease(path, who)


def _lives(holder: dict[str, Any], path: Path, wait: Callable[[float], None]) -> bool:
    if holder and all(holder.get(key) == value for key, value in _where().items()):
        return holder.get("began") is not None and _began(int(holder.get("pid", 0))) == holder["began"]
    for _ in range(_SILENT_BEATS):
        wait(BEAT_S)
        if _read(path) != holder:
            return path.exists()
    return False


def _where() -> dict[str, str]:
    """Which host since its start, and which container of it: where these are equal, process numbers mean the same."""
    found = {"boot": "", "container": ""}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["container"] = str(Path("/proc/self/ns/pid").readlink())
    return found


def _began(pid: int) -> str | None:
    """When a process began, by the kernel's count: a number that was given anew is told apart."""
    with suppress(OSError):
        stat = read_stat(pid)
        return None if stat.state in "ZX" else str(stat.start_ticks)
    return None


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}
