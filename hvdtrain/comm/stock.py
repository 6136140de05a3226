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
    """A job of Horovod's own elastic driver. A round is what Horovod calls a rendezvous. Collective: yes.

    Here the first round is joined at once: ranks that are there already wait for the others without a time limit in
    a collective, but not in Horovod's initialisation.

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
        """Horovod's driver has found other hosts. In a thread of Horovod's."""
        self._changed = True

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        """Join the next round; Horovod's driver says who this process is in it. Collective: yes.

        Errors:
            HorovodError: its host is not wanted any more, or another rank was lost meanwhile.
        """
        from hvdtrain.comm.horovod import HorovodComm, begin_session, hvd

        comm, self._first = self._first, None
        if comm is None:
            hvd.shutdown()
            begin_session()
            self._changed = False
            try:
                comm = HorovodComm()
            except ValueError as error:  # Horovod says why to its log alone
                raise HorovodError(
                    f"the ranks of the next round could not be joined: {error}",
                    next_step="nothing, where this host was taken from the job; else the driver starts it anew",
                ) from None
        # Horovod has told C alone.
        facts = {name: getattr(comm, name) for name in ("rank", "size", "local_rank", "local_size")}
        change_variables(horovod_numbers(facts))
        return comm

    def is_over(self, error: BaseException) -> bool:
        """Whether Horovod lost a rank."""
        return is_lost_rank(error)

    def notices(self, notices: list[int], changed: int, terminate: int) -> list[int]:
        """What came, and whether hosts have changed."""
        found = list(notices)
        found[changed] = int(self._changed)
        return found

    def guard_parts(self, parts: Iterable[T]) -> Iterable[T]:
        """All of them: only Horovod knows, and says so when it is asked for a collective."""
        return parts

    def report_progress(self, spans: Spans) -> None:
        """Do nothing: Horovod's driver does not look."""

    def report_leaving(self, why: str) -> None:
        """Do nothing: it is the exit code that counts."""
