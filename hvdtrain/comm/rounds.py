"""Rounds: between two of them ranks may come and go. A job that is not elastic has one."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from hvdtrain.comm.waiting import waits_in_collective
from hvdtrain.runtime.driver_client import DriverClient, Heartbeat, Place
from hvdtrain.runtime.environment import RankInfo, change_variables
from hvdtrain.runtime.gloo import refuse_without_address
from hvdtrain.runtime.sockets import cut, open_sockets

if TYPE_CHECKING:
    from hvdtrain.comm.base import Comm
    from hvdtrain.comm.horovod import HorovodComm
    from hvdtrain.spans import Spans

T = TypeVar("T")

STARTED, FAILED, CHANGED = "started", "failed", "changed"
"""Why a rank wants a place."""

_AGAIN_S = 0.05
"""Between two looks at what ranks that meet have opened, once one of them is gone."""


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error is Horovod's own for a rank that is gone, or one that follows from cutting its connections."""
    from hvdtrain.comm.horovod import HorovodInternalError

    return isinstance(error, HorovodInternalError)


class Rounds(Protocol):
    """How a process gets among other ranks, and finds out that these have changed.

    Attributes:
        elastic: whether there may be more than one round.
        local_rank: this process among those of its host, for good: it has the device of this number.
        local_size: how many there may be.
    """

    elastic: bool
    local_rank: int
    local_size: int

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """Join the ranks of the next round. Collective: yes.

        Args:
            why: started, failed or changed.
            text: of the error that ended the round before.
            step: optimizer steps that this process's memory holds; -1 for nothing.

        Errors:
            NoPlace: this process is not wanted any more.
        """
        ...

    def is_over(self, error: BaseException) -> bool:
        """Whether an error means that ranks of this round are gone, and not that this one has failed."""
        ...

    def notices(self, notices: list[int], changed: int, terminate: int) -> list[int]:
        """Return this rank's requests at its next step: end the round, or the run (`DriverClient.notices`)."""
        ...

    def guard_parts(self, parts: Iterable[T]) -> Iterable[T]:
        """The micro-batches of a step, and an error as soon as the step cannot be done: `is_over` is true of it."""
        ...

    def report_progress(self, spans: Spans) -> None:
        """Let others know of the progress of this thread."""
        ...

    def report_leaving(self, why: str) -> None:
        """Training is over; this process comes to its end."""
        ...


class OneRound:
    """A job whose ranks stay.

    Args:
        comm: these ranks.
    """

    elastic = False

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.local_rank = comm.local_rank
        self.local_size = comm.local_size

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """The ranks there are."""
        return self._comm

    def is_over(self, error: BaseException) -> bool:
        """Never: an error ends the job."""
        return False

    def notices(self, notices: list[int], changed: int, terminate: int) -> list[int]:
        """As they came."""
        return notices

    def guard_parts(self, parts: Iterable[T]) -> Iterable[T]:
        """All of them."""
        return parts

    def report_progress(self, spans: Spans) -> None:
        """Do nothing."""

    def report_leaving(self, why: str) -> None:
        """Do nothing."""


class DriverRounds:
    """A job of our own elastic driver.

    Args:
        client: this process's.
        info: who it is by the environment, before the first round.
    """

    elastic = True

    def __init__(self, client: DriverClient, info: RankInfo) -> None:
        self._client = client
        self.local_rank = info.local_rank
        self.local_size = info.local_size

    def enter(self, why: str, text: str = "", step: int = -1) -> HorovodComm:
        """Join the next round, and the one after it where that does not come about. Collective: yes."""
        while True:
            self._leave()
            place = self._client.join(why, text, step)
            self._client.heartbeat = Heartbeat()
            try:
                return self._meet(place)
            except Exception as error:
                why, text = FAILED, str(error)

    def _leave(self) -> None:
        from hvdtrain.comm.horovod import hvd

        self._client.wake = lambda: None
        began_s = time.monotonic()
        self._client.heartbeat = Heartbeat(idle_s=lambda: time.monotonic() - began_s)  # shutdown may hang
        hvd.shutdown()  # also what init has left that failed; nothing where there was none

    def _meet(self, place: Place) -> HorovodComm:
        """Connect to the other ranks of the round.

        Errors:
            Exception: one of them is gone; of several types, since Horovod gives its own no room here.
        """
        from hvdtrain.comm.horovod import HorovodComm, begin_session

        variables = place.variables()
        refuse_without_address(variables)
        change_variables(variables)
        before, met = open_sockets().keys(), threading.Event()
        cutter = threading.Thread(target=_cut_all, args=(before, met), daemon=True)
        self._client.wake = cutter.start
        try:
            self._check_whole()
            begin_session()
            comm = HorovodComm()
        finally:
            met.set()
            if cutter.is_alive():
                cutter.join()  # what the next round opens is not to be cut
        opened = open_sockets().keys() - before
        self._client.wake = lambda: cut(opened)
        self._check_whole()  # told before there was all of it to cut
        return comm

    def _check_whole(self) -> None:
        if self._client.is_broken():
            raise ConnectionError("a rank of the round was gone before it began")

    def is_over(self, error: BaseException) -> bool:
        """Whether Horovod lost a rank."""
        return is_lost_rank(error)

    def notices(self, notices: list[int], changed: int, terminate: int) -> list[int]:
        """A SIGTERM that came to this rank alone lets it go and the others train on."""
        return self._client.notices(notices, changed, terminate)

    def guard_parts(self, parts: Iterable[T]) -> Iterator[T]:
        """Those that come before the driver says that a rank is gone; Horovod would tell only in the last backward."""
        from hvdtrain.comm.horovod import HorovodInternalError

        for part in parts:
            if self._client.is_broken():
                raise HorovodInternalError("a rank of the round is gone")
            yield part

    def report_progress(self, spans: Spans) -> None:
        """Tell the driver once a second."""
        thread = threading.get_ident()
        self._client.heartbeat = Heartbeat(lambda: spans.step, spans.idle_s, lambda: waits_in_collective(thread))

    def report_leaving(self, why: str) -> None:
        """Tell the driver."""
        self._client.leaving(why)


def _cut_all(before: Collection[int], met: threading.Event) -> None:
    """Cut what was opened since, and what comes after it, until the ranks have met or given up."""
    while not met.is_set():
        cut(open_sockets().keys() - before)
        met.wait(_AGAIN_S)
