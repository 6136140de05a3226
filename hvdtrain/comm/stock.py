"""Rounds of Horovod's own elastic driver: ``horovodrun --min-np ... --host-discovery-script ...``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from hvdtrain.comm.rounds import is_lost_rank
from hvdtrain.errors import HorovodError
from hvdtrain.runtime.environment import change_variables, horovod_numbers

if TYPE_CHECKING:
    from hvdtrain.comm.base import Comm
    from hvdtrain.comm.horovod import HorovodComm
    from hvdtrain.spans import Spans

T = TypeVar("T")


class StockRounds:
    """A job of Horovod's own elastic driver. A round is one rendezvous of Horovod. Collective: yes.

    The first round is joined at once. Running ranks wait for the others without a timeout in a collective, but not in
    Horovod's initialisation.

    Args:
        comm: the ranks of the first round.
    """

    elastic = True

    def __init__(self, comm: HorovodComm) -> None:
        from hvdtrain.comm.horovod import on_host_updates

        self._first: HorovodComm | None = comm
        self._changed = False
        self.local_rank = comm.local_rank
        self.local_size = comm.local_size
        on_host_updates(self)

    def on_hosts_updated(self, timestamp: int, update: Any) -> None:
        """Note that Horovod's driver has found other hosts. Called in a thread of Horovod."""
        self._changed = True

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """Join the next round with the rank from Horovod's driver. Collective: yes.

        Errors:
            HorovodError: the job no longer uses its host, or another rank was lost meanwhile.
        """
        from hvdtrain.comm.horovod import HorovodComm, begin_session, hvd

        comm, self._first = self._first, None
        if comm is None:
            hvd.shutdown()
            begin_session()
            self._changed = False
            try:
                comm = HorovodComm()
            except ValueError as error:  # Horovod logs the reason
                raise HorovodError(
                    f"joining the next round failed: {error}",
                    next_step="nothing if the job no longer uses this host; otherwise the driver restarts this rank",
                ) from None
        # Horovod has set them only in C.
        facts = {name: getattr(comm, name) for name in ("rank", "size", "local_rank", "local_size")}
        change_variables(horovod_numbers(facts))
        return comm

    def is_over(self, error: BaseException) -> bool:
        """Whether Horovod lost a rank."""
        return is_lost_rank(error)

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        """Add to `requests` whether the hosts have changed."""
        found = list(requests)
        found[changed] = int(self._changed)
        return found

    def guard_parts(self, parts: Iterable[T]) -> Iterable[T]:
        """Return `parts` unchanged: only Horovod knows of a lost rank, and fails in the next collective."""
        return parts

    def report_progress(self, spans: Spans) -> None:
        """Do nothing: Horovod's driver does not monitor progress."""

    def report_leaving(self, why: str) -> None:
        """Do nothing: only the exit code counts."""
