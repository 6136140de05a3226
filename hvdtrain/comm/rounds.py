"""Rounds: periods with fixed ranks. Ranks join and leave between rounds. A job that is not elastic has one round."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from hvdtrain.errors import UnreachableError
from hvdtrain.runtime.driver_client import DriverClient, Heartbeat, Place, connect_to_driver
from hvdtrain.runtime.environment import (
    GLOO_LAUNCHER,
    NO_LAUNCHER,
    TORCHRUN,
    RankInfo,
    change_variables,
    horovod_numbers,
    refuse_unused_launcher,
)
from hvdtrain.runtime.interfaces import refuse_without_address
from hvdtrain.runtime.threads import open_sockets, shut_down_receiving

if TYPE_CHECKING:
    from hvdtrain.comm.horovod import HorovodComm
    from hvdtrain.spans import Spans

T = TypeVar("T")

STARTED, FAILED, CHANGED = "started", "failed", "changed"  # why a rank asks for a place

_WAITING_IN = ("hvdtrain.comm.horovod", "horovod.")
_INNERMOST = 3
_AGAIN_S = 0.05  # between two checks for new connections while the round cannot be completed


class Rounds(ABC):
    """How a process joins other ranks, and notices changes among them."""

    elastic = True  # whether there may be more than one round

    def __init__(self, process: Comm | RankInfo) -> None:
        self.local_rank = process.local_rank  # constant: this process uses the device with this number
        self.local_size = process.local_size  # upper bound of the processes on this host

    @abstractmethod
    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """Join the ranks of the next round, because it has `STARTED`, `FAILED` or `CHANGED`. Collective: yes.

        `text`: of the error that ended the round before. `step`: optimizer steps in memory here; -1 for no state.

        Errors: NoPlace: the job continues or ends without this process.
        """

    def is_over(self, error: BaseException) -> bool:
        """Check whether an error means that this round has lost ranks, not that this rank has failed.

        It is Horovod's error for a lost rank, or follows from cutting its connections.
        """
        from hvdtrain.comm.horovod import HorovodInternalError

        return isinstance(error, HorovodInternalError)

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        """Return this rank's requests at its next step: end the round, or the run (`DriverClient.requests`)."""
        return requests

    def is_leaving(self) -> bool:
        """Return whether this rank is known to leave when the round ends."""
        return False

    def guard_parts(self, parts: Iterable[T]) -> Iterable[T]:
        """Yield a step's micro-batches; may raise an error of `is_over` once the step cannot be completed."""
        return parts

    def report_progress(self, spans: Spans) -> None:  # noqa: B027
        """Report the progress of this thread to others."""

    def report_leaving(self, why: str) -> None:  # noqa: B027
        """Report that training is over and this process ends."""

    def report_wrong(self, rank: int) -> None:  # noqa: B027
        """Report that a rank of this round has computed wrong bits."""


class OneRound(Rounds):
    """A job with constant ranks."""

    elastic = False

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._comm = comm

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """Return the ranks."""
        return self._comm

    def is_over(self, error: BaseException) -> bool:
        """Return False: an error ends the job."""
        return False


class StockRounds(Rounds):
    """A job of Horovod's own elastic driver: ``horovodrun --min-np ... --host-discovery-script ...``.

    A round is one rendezvous of Horovod. The first one is joined at once. Running ranks wait for the others without a
    timeout in a collective, but not in Horovod's initialisation. Of a lost rank only Horovod knows, and fails in the
    next collective. Its driver does not monitor progress, and looks only at exit codes.
    """

    def __init__(self, comm: Comm) -> None:
        from hvdtrain.comm.horovod import on_host_updates

        super().__init__(comm)
        self._first: Comm | None = comm
        self._changed = False
        on_host_updates(self)

    def on_hosts_updated(self, timestamp: int, update: Any) -> None:
        """Note that Horovod's driver has found other hosts. Called in a thread of Horovod."""
        self._changed = True

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """Join the next round with the rank from Horovod's driver. Collective: yes.

        Errors: UnreachableError: the job no longer uses its host, or another rank was lost meanwhile.
        """
        from hvdtrain.comm.horovod import HorovodComm, begin_session, hvd

        comm, self._first = self._first, None
        if comm is None:
            hvd.shutdown()
            begin_session()
            self._changed = False
            try:
                comm = HorovodComm()
            except UnreachableError as error:
                raise UnreachableError(
                    f"joining the next round failed: {error.__cause__}",
                    next_step="nothing if the job no longer uses this host; otherwise the driver restarts this rank",
                ) from None
        # Horovod has set them only in C.
        facts = {name: getattr(comm, name) for name in ("rank", "size", "local_rank", "local_size")}
        change_variables(horovod_numbers(facts))
        return comm

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        """Add to `requests` whether the hosts have changed."""
        found = list(requests)
        found[changed] = int(self._changed)
        return found


class DriverRounds(Rounds):
    """A job of hvdtrain's own elastic driver. `info` is from the environment, before the first round."""

    def __init__(self, client: DriverClient, info: RankInfo) -> None:
        super().__init__(info)
        self._client = client

    def enter(self, why: str, text: str = "", step: int = -1) -> HorovodComm:
        """Join the next round, or a later one where that fails. Collective: yes. Errors: one that would recur."""
        while True:
            self._leave()
            place = self._client.join(why, text, step)
            self._client.heartbeat = Heartbeat()
            try:
                return self._meet(place)
            except Exception as error:
                if getattr(error, "recurs", False):
                    raise
                why, text = FAILED, str(error.__cause__ or error)

    def _leave(self) -> None:
        from hvdtrain.comm.horovod import hvd

        self._client.wake = lambda: None
        began_s = time.monotonic()
        self._client.heartbeat = Heartbeat(idle_s=lambda: time.monotonic() - began_s)  # shutdown may hang
        hvd.shutdown()  # also cleans up after a failed init

    def _meet(self, place: Place) -> HorovodComm:
        """Connect to the other ranks of the round.

        Errors: Exception: one of them is lost; of several types, as Horovod does not use its own here.
        """
        from hvdtrain.comm.horovod import HorovodComm, begin_session

        variables = place.variables()
        refuse_without_address(variables)
        change_variables(variables)
        before, met = open_sockets().keys(), threading.Event()

        def cut_all() -> None:  # that were opened since then, until the ranks have met or given up
            while not met.is_set():
                shut_down_receiving(open_sockets().keys() - before)
                met.wait(_AGAIN_S)

        cutter = threading.Thread(target=cut_all, daemon=True)
        self._client.wake = cutter.start
        try:
            self._check_whole()
            begin_session()
            comm = HorovodComm()
        finally:
            met.set()
            if cutter.is_alive():
                cutter.join()  # it must not cut connections of the next round
        opened = open_sockets().keys() - before
        self._client.wake = lambda: shut_down_receiving(opened)
        self._check_whole()  # the loss may have been reported while connections were opening
        return comm

    def _check_whole(self) -> None:
        if self._client.is_broken():
            raise ConnectionError("the round lost a rank before it began")

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        """Turn a SIGTERM to this rank alone into a request to leave; the others continue."""
        return self._client.requests(requests, changed, terminate)

    def is_leaving(self) -> bool:
        """Return whether the driver, or a SIGTERM, has asked this rank to leave."""
        return self._client.is_leaving()

    def guard_parts(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield `parts` until the driver reports a lost rank; Horovod itself would fail only in the last backward."""
        from hvdtrain.comm.horovod import HorovodInternalError

        for part in parts:
            if self._client.is_broken():
                raise HorovodInternalError("the round has lost a rank")
            yield part

    def report_progress(self, spans: Spans) -> None:
        """Report progress to the driver once a second."""
        thread = threading.get_ident()
        self._client.heartbeat = Heartbeat(
            lambda: spans.step, spans.idle_s, lambda: in_collective(sys._current_frames().get(thread))
        )

    def report_leaving(self, why: str) -> None:
        """Report the end to the driver."""
        self._client.report_leaving(why)

    def report_wrong(self, rank: int) -> None:
        """Report it to the driver, which leaves out its host."""
        self._client.report_wrong(rank)


def in_collective(frame: FrameType | None) -> bool:
    """Check whether a thread waits for other ranks: one of its innermost frames is in the communicator."""
    for _ in range(_INNERMOST):
        if frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_WAITING_IN):
            return True
        frame = frame.f_back if frame is not None else None
    return False


Groups = Callable[[int], Sequence[Sequence[int]]]
"""Returns the ranks of each group that will exchange apart, of a number of ranks."""


def start_rounds(info: RankInfo, groups: Groups = lambda size: (), *, horovod: bool = True) -> Rounds:
    """Return the rounds of this job. A job that is not elastic has one, which is joined here.

    `groups`: of ranks that will exchange apart. `horovod`: whether training needs Horovod; without it torchrun may have
    started the ranks. Collective: yes, unless of hvdtrain's own elastic driver. Errors: those of `start_comm`.
    """
    refuse_unused_launcher(info, horovod=horovod)
    client = connect_to_driver(info.variables)
    if client is not None:
        return DriverRounds(client, info)
    comm = start_comm(info, groups)
    if info.launcher == GLOO_LAUNCHER and info.variables.get("HOROVOD_ELASTIC") == "1":  # set by Horovod's own driver
        return StockRounds(comm)
    return OneRound(comm)


def start_comm(info: RankInfo, groups: Groups = lambda size: ()) -> Comm:
    """Join the job that the launcher started; without a launcher, return a job of one rank that needs no Horovod.

    `groups`: of ranks that will exchange apart. Collective: yes. Call `runtime.tuning.prepare` before.

    Errors: ConfigError: the ranks cannot form these groups; HorovodError: missing, or built for another torch, or
    without MPI; LaunchError: this process was started by an MPI that Horovod does not use, or by a launcher that does
    not start the ranks of one job.
    """
    sets = groups(info.size)
    if info.launcher == NO_LAUNCHER or (info.launcher == TORCHRUN and info.size == 1):
        return SoloComm()
    if info.launcher == TORCHRUN:
        from hvdtrain.comm.torch_group import join_torchrun

        return join_torchrun(info)
    from hvdtrain.install import record
    from hvdtrain.runtime import mpi

    record.check(by_mpi=info.launcher != GLOO_LAUNCHER)
    mpi.check_launch(info)
    refuse_without_address(info.variables)
    from hvdtrain.comm.horovod import HorovodComm

    comm = HorovodComm(groups=sets)
    mpi.check_size(info, comm.size)
    return comm
