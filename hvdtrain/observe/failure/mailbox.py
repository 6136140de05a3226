"""Exchange statements between the ranks of a failed job, through files in the run folder.

::

    RUN/.ranks/NONCE/        created by rank 0 at each start
        said/00001.failed    a rank's statement, see `statement`; this folder is empty until a rank fails
        alive/00001.7.250    a rank's newest heartbeat: its number, and for how long there was no progress, in ms
        left/00001           the rank has finished
        fatal/00001          the trace that Python's faulthandler wrote when the rank crashed in native code
        card.0               claimed by the rank that writes the card; card.1 by the next one if the first one dies
        reported             the card is written and shown

Files and no sockets: files stay readable when ranks die, hang or are stopped. Each rank checks at the start whether it
sees the folder that rank 0 created. A rank without a shared file system reports for itself only.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.observe.failure import process_states
from hvdtrain.observe.failure.statement import CURRENT, FAILED, STALLED, RankProcess, Statement
from hvdtrain.run_layout import RunLayout

_Value = TypeVar("_Value")

_POLLS_PER_S = 200
"""Polls of the folder by all ranks together."""
_PARTS = ("said", "alive", "left", "fatal")


class Beat(NamedTuple):
    """What the name of a heartbeat says."""

    number: int  # of a rank, one more each time
    idle_s: float  # for which it had made no progress

    def file(self, rank: int) -> str:
        """Return the name of the file."""
        return f"alive/{rank:05d}.{self.number}.{1000 * self.idle_s:.0f}"


@dataclass(frozen=True)
class Mailbox:
    """The files of one start of a job, as one rank sees them."""

    folder: Path | None  # RUN/.ranks/NONCE, absolute; None where this rank does not see it
    process: RankProcess
    ranks: tuple[RankProcess, ...]  # every rank, this one included
    visible: frozenset[int]  # ranks with processes that this rank sees in /proc
    reachable: frozenset[int]  # ranks with statements that this rank sees

    def post_statement(self, statement: Statement) -> None:
        """Write a statement. It replaces this rank's earlier statement of the same kind."""
        self._put(f"said/{self.process.rank:05d}.{statement.kind}", statement)

    def has_statements(self) -> bool:
        """Return whether any rank has written a statement.

        Listing an empty folder takes microseconds. Unlike a check for one file, it makes a network file system refresh.
        """
        return any(True for _ in self._names("said"))

    def statements(self, known: dict[str, Statement]) -> list[Statement]:
        """Return one statement for each rank that made one: the most informative kind.

        `known` holds statements that were read before, by file. They are not read again; new ones are added.
        """
        for name in self._names("said"):
            if name not in known and (statement := self._get(f"said/{name}", Statement)):
                known[name] = statement
        found: dict[int, Statement] = {}
        for kind in (CURRENT, STALLED, FAILED):
            found |= {s.process.rank: s for name, s in known.items() if name.endswith(f".{kind}")}
        return [found[rank] for rank in sorted(found)]

    def post_heartbeat(self, number: int, idle_s: float, facts: dict[str, Any], before: str = "") -> str:
        """Write this rank's heartbeat: that it is alive, and what it does. It replaces the one `before`.

        Returns the name of the newest. It has the number and the seconds without progress, so that one listing shows
        them for all ranks: a thousand ranks that each read a thousand files would stop a file server.
        """
        name = Beat(number, idle_s).file(self.process.rank)
        self._put(name, facts)
        if not self._file(name).exists():  # the disk is full: the one before stays
            return before
        if before:
            with suppress(OSError):
                self._file(before).unlink()
        return name

    def beats(self) -> dict[int, Beat]:
        """Return the number and the seconds without progress of each rank's newest heartbeat, by a listing."""
        found: dict[int, Beat] = {}
        for name in self._names("alive"):
            with suppress(ValueError):  # another name, such as .nfs0001 of an open file that was removed
                rank, number, idle_ms = map(int, name.split("."))
                found[rank] = max(found.get(rank, Beat(0, 0.0)), Beat(number, idle_ms / 1000))
        return found

    def heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return what each rank's last heartbeat says."""
        return {rank: value for rank, beat in self.beats().items() if (value := self._get(beat.file(rank), dict))}

    def mark_finished(self) -> None:
        """Record that this rank has finished, so that no other rank reports it as dead."""
        self._touch(f"left/{self.process.rank:05d}")

    def has_finished(self, rank: int) -> bool:
        """Return whether a rank has finished. All have once rank 0 has removed the folder at the end of the run.

        False where this rank sees no folder.
        """
        return self.folder is not None and (self._file(f"left/{rank:05d}").exists() or not self.folder.exists())

    def states(self) -> dict[int, str]:
        """Return the state of each visible process of another rank, except of finished ranks."""
        found = {r.rank: process_states.state(r.pid, r.began) for r in self.ranks if r.rank in self.visible}
        dead = process_states.DEAD
        return {rank: state for rank, state in found.items() if state not in dead or not self.has_finished(rank)}

    def crash_text(self, rank: int) -> str:
        """Return the trace that Python wrote when the rank crashed."""
        with suppress(OSError):
            return self._file(f"fatal/{rank:05d}").read_text(errors="replace").strip()
        return ""

    def claim_card(self, number: int) -> bool:
        """Return whether this rank is the one to write the card, at attempt `number` (from 0)."""
        try:
            self._file(f"card.{number}").touch(exist_ok=False)
        except OSError as error:  # if the disk is full or lost, two cards are better than none
            return not isinstance(error, FileExistsError)
        return True

    def renew_claim(self, number: int) -> None:
        """Record that this rank still works on the card that it has claimed."""
        self._touch(f"card.{number}")

    def claim_time_ns(self, number: int) -> int:
        """Return when the claim of a card was last renewed. Only changes of the number matter."""
        with suppress(OSError):
            return self._file(f"card.{number}").stat().st_mtime_ns
        return 0

    def poll_interval_s(self, least_s: float) -> float:
        """Return the seconds between polls of the folder, so that all ranks do not overload one file server."""
        return max(least_s, len(self.ranks) / _POLLS_PER_S)

    def is_reported(self) -> bool:
        """Return whether the card is written and shown."""
        return self._file("reported").exists()

    def mark_reported(self) -> None:
        """Record that the card is written and shown."""
        self._touch("reported")

    def remove(self) -> None:
        """Remove the folder. Called by rank 0 when the run ends without a failure."""
        if self.folder is not None:
            _remove(self.folder.parent)

    def _file(self, name: str) -> Path:
        """Return the path of a file. Where this rank sees no folder, it is one that nobody can make or open."""
        return (self.folder or Path(os.devnull)) / name

    def _put(self, name: str, value: Statement | dict[str, Any]) -> None:
        """Write a file atomically. A failed write is ignored: the card says which ranks are missing."""
        path = self._file(name)
        temporary = self._file(f".{path.name}.{path.parent.name}")
        with suppress(OSError):
            temporary.write_bytes(msgspec.json.encode(value))
            temporary.replace(path)

    def _get(self, name: str, kind: type[_Value]) -> _Value | None:
        with suppress(OSError, ValueError):
            return msgspec.json.decode(self._file(name).read_bytes(), type=kind)
        return None

    def _names(self, part: str) -> list[str]:
        with suppress(OSError):
            return sorted(path.name for path in self._file(part).iterdir())
        return []

    def _touch(self, name: str) -> None:
        with suppress(OSError):
            self._file(name).touch()


def open_mailbox(directory: Path, comm: Comm, process: RankProcess) -> Mailbox:
    """Create the files of this start in the run folder `directory`, which rank 0 knows. Collective: yes."""
    place = on_rank_0(comm, lambda: _make(directory), name="mailbox")
    folder = Path(place) if place and (Path(place) / "said").is_dir() else None
    everyone = allgather_json(comm, {**msgspec.to_builtins(process), "sees": folder is not None}, name="mailbox/ranks")
    sees = [facts.pop("sees") for facts in everyone]
    reachable = {rank for rank, seen in enumerate(sees) if seen and folder is not None}
    ranks = tuple(RankProcess(**facts) for facts in everyone)
    # A container may share the host's name, but not its process IDs: only processes found now are looked up later.
    neighbours = [r for r in ranks if r.rank != process.rank and r.host == process.host]
    visible = frozenset(r.rank for r in neighbours if process_states.started(r.pid) == r.began)
    return Mailbox(folder, process, ranks, visible, frozenset(reachable))


def _make(directory: Path) -> str:
    """Create the folder on rank 0. Empty where that fails: the run must not fail because of its failure report."""
    folder = RunLayout(directory.resolve()).ranks / secrets.token_hex(8)
    try:
        _remove(folder.parent)
        for part in _PARTS:
            (folder / part).mkdir(parents=True)
    except OSError:
        return ""
    return str(folder)


def _remove(folder: Path) -> None:
    """Rename ``RUN/.ranks``, then remove it: in a half removed one, ranks would seem not to have finished."""
    with suppress(OSError):
        folder.rename(folder.with_name(f"{folder.name}.removing-{secrets.token_hex(4)}"))
    for leftover in folder.parent.glob(f"{folder.name}.removing-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def crash_notes(mailbox: Mailbox) -> Iterator[None]:
    """Let Python's faulthandler write to the mailbox if native code crashes, unless it is already in use."""
    with ExitStack() as closing:
        if mailbox.folder is not None and not faulthandler.is_enabled():
            with suppress(OSError):
                file = (mailbox.folder / f"fatal/{mailbox.process.rank:05d}").open("w")
                faulthandler.enable(file=closing.enter_context(file))
                closing.callback(faulthandler.disable)
        yield
