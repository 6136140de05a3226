"""Where the ranks of a job leave word for each other when they cannot talk: files in the run folder.

::

    RUN/.ranks/NONCE/        made anew by rank 0 at each start
        said/00001.failed    a rank's statement, see `statement`; this folder is empty while all is well
        alive/00001          what a rank is at, written again every few seconds
        left/00001           a rank that has come to its end
        fatal/00001          what Python's faulthandler wrote when a rank crashed in native code
        card.0               taken by the rank that writes the card; card.1 by the next, should that one not get through
        told                 the card is written and shown

There is no server and no socket: when ranks die, hang or are stopped, a file is what remains readable. Each rank finds
out at start whether it sees what rank 0 made; who does not, for want of a shared file system, speaks for itself alone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.observe.failure import process
from hvdtrain.observe.failure.statement import FAILED, HERE, STALLED, Statement, Who, from_json
from hvdtrain.run_layout import RunLayout

_LOOKS_A_SECOND = 200
"""Of all ranks together."""
_PARTS = ("said", "alive", "left", "fatal")


@dataclass(frozen=True)
class Mailbox:
    """The files of one start of a job, as one rank sees them.

    Attributes:
        folder: RUN/.ranks/NONCE, absolute; None where this rank does not see it.
        who: this rank.
        ranks: every rank, this one included.
        visible: ranks whose processes this one sees in /proc.
        reachable: ranks that see the folder.
    """

    folder: Path | None
    who: Who
    ranks: tuple[Who, ...]
    visible: frozenset[int]
    reachable: frozenset[int]

    def say(self, statement: Statement) -> None:
        """Leave a statement; what this rank has said of the same kind is replaced."""
        self._put(f"said/{self.who.rank:05d}.{statement.kind}", statement.to_json())

    def anyone_spoke(self) -> bool:
        """Whether any rank has left a statement.

        Listing an empty folder costs microseconds, and unlike asking for a file it makes a network file system look.
        """
        return any(True for _ in self._names("said"))

    def statements(self, known: dict[str, Statement] | None = None) -> list[Statement]:
        """The statement of each rank that made one: of several, the one that says more.

        Args:
            known: those that were read before, by file; they are not read again, and new ones are added.
        """
        known = {} if known is None else known
        for name in self._names("said"):
            if name not in known and (value := self._get(f"said/{name}")):
                known[name] = from_json(value)
        found: dict[int, Statement] = {}
        for kind in (HERE, STALLED, FAILED):
            found |= {s.who.rank: s for name, s in known.items() if name.endswith(f".{kind}")}
        return [found[rank] for rank in sorted(found)]

    def beat(self, facts: dict[str, Any]) -> None:
        """Leave word that this rank lives, and what it is at."""
        self._put(f"alive/{self.who.rank:05d}", facts)

    def beats(self) -> dict[int, dict[str, Any]]:
        """What each rank last left of itself."""
        return {int(name): value for name in self._names("alive") if (value := self._get(f"alive/{name}"))}

    def leave(self) -> None:
        """Leave word that this rank has come to its end, so that nobody misses it."""
        self._touch(f"left/{self.who.rank:05d}")

    def has_left(self, rank: int) -> bool:
        """Whether a rank has come to its end; all have where the folder is gone, which the end of a run removes.

        Without a folder nobody can say so.
        """
        return self.folder is not None and ((self.folder / f"left/{rank:05d}").exists() or not self.folder.exists())

    def states(self) -> dict[int, str]:
        """How the processes of the other ranks are that this one sees; those that came to their end are left out."""
        found = {r.rank: process.state(r.pid, r.began) for r in self.ranks if r.rank in self.visible}
        return {rank: state for rank, state in found.items() if state not in process.DEAD or not self.has_left(rank)}

    def hears(self, rank: int) -> bool:
        """Whether this rank sees what that one says."""
        return self.folder is not None and rank in self.reachable

    def fatal(self, rank: int) -> str:
        """What Python wrote when the rank crashed."""
        if self.folder is not None:
            with suppress(OSError):
                return (self.folder / f"fatal/{rank:05d}").read_text(errors="replace").strip()
        return ""

    def fatal_file(self) -> Path | None:
        """Where Python shall write if this rank crashes."""
        return self.folder / f"fatal/{self.who.rank:05d}" if self.folder is not None else None

    def claim(self, number: int) -> bool:
        """Whether this rank is the one to write the card, at the `number`-th try, from 0."""
        if self.folder is None:
            return True
        try:
            os.close(os.open(self.folder / f"card.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError:  # a disk that is full or went away: better two cards than none
            return True
        return True

    def go_on_claiming(self, number: int) -> None:
        """Leave word that this rank, who claimed the card, is still at it."""
        self._touch(f"card.{number}")

    def claimed_at(self, number: int) -> int:
        """When who claimed a card last said so: a number that changes."""
        if self.folder is not None:
            with suppress(OSError):
                return (self.folder / f"card.{number}").stat().st_mtime_ns
        return 0

    def every_s(self, least_s: float) -> float:
        """How often to look at the folder, where each rank does: so many looks a second that one server stands it."""
        return max(least_s, len(self.ranks) / _LOOKS_A_SECOND)

    def told(self) -> bool:
        """Whether the card is written and shown."""
        return self.folder is not None and (self.folder / "told").exists()

    def tell(self) -> None:
        """Leave word that the card is written and shown."""
        self._touch("told")

    def remove(self) -> None:
        """At the good end of a run, on rank 0."""
        if self.folder is not None:
            _remove(self.folder.parent)

    def _put(self, name: str, value: dict[str, Any]) -> None:
        """Write a file, whole or not at all. What cannot be written is lost: the card says which ranks are missing."""
        if self.folder is None:
            return
        path = self.folder / name
        temporary = self.folder / f".{path.name}.{path.parent.name}"
        with suppress(OSError):
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(path)

    def _get(self, name: str) -> dict[str, Any]:
        if self.folder is not None:
            with suppress(OSError, ValueError):
                value = json.loads((self.folder / name).read_text(encoding="utf-8"))
                return value if isinstance(value, dict) else {}
        return {}

    def _names(self, part: str) -> list[str]:
        if self.folder is not None:
            with suppress(OSError):
                return sorted(path.name for path in (self.folder / part).iterdir())
        return []

    def _touch(self, name: str) -> None:
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / name).touch()


def open_post(directory: Path, comm: Comm, who: Who) -> Mailbox:
    """Make the files of this start in the run folder `directory`, which rank 0 knows. Collective: yes."""
    place = on_rank_0(comm, lambda: _make(directory), name="post")
    folder = Path(place) if place and (Path(place) / "said").is_dir() else None
    everyone = allgather_json(comm, {**asdict(who), "sees": folder is not None}, name="post/ranks")
    reachable = frozenset(rank for rank, facts in enumerate(everyone) if facts.pop("sees"))
    ranks = tuple(Who(**facts) for facts in everyone)
    # A container of its own may share the host's name and not its numbers: only who is found now is looked for later.
    seen = {r.rank for r in ranks if r.rank != who.rank and r.host == who.host and process.started(r.pid) == r.began}
    return Mailbox(folder, who, ranks, frozenset(seen), reachable)


def _make(directory: Path) -> str:
    """On rank 0. A folder that cannot be made is done without: telling of a failure is no reason for one."""
    folder = RunLayout(directory.resolve()).ranks / secrets.token_hex(8)
    try:
        _remove(folder.parent)
        for part in _PARTS:
            (folder / part).mkdir(parents=True)
    except OSError:
        return ""
    return str(folder)


def _remove(folder: Path) -> None:
    """Rename ``RUN/.ranks``, then remove it: in a half removed one, ranks would seem not to have ended."""
    with suppress(OSError):
        folder.rename(folder.with_name(f"{folder.name}.removing-{secrets.token_hex(4)}"))
    for leftover in folder.parent.glob(f"{folder.name}.removing-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def crash_notes(post: Mailbox) -> Iterator[None]:
    """Have Python's faulthandler write to the post if native code crashes, unless somebody uses it already."""
    import faulthandler

    path = post.fatal_file()
    if path is None or faulthandler.is_enabled():
        yield
        return
    try:
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        faulthandler.enable(file=file)
        try:
            yield
        finally:
            faulthandler.disable()
