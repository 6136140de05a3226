"""A rank of an elastic job gives up a step as soon as it is notified that another rank is dead."""

from __future__ import annotations

import socket

import pytest

from hvdtrain.comm.horovod import HorovodComm
from hvdtrain.comm.rounds import DriverRounds, StockRounds
from hvdtrain.comm.solo import SoloComm
from hvdtrain.errors import UnreachableError
from hvdtrain.runtime.driver_client import Place
from hvdtrain.runtime.environment import rank_info
from tests.support.launch import TIMEOUT_S


class _Client:
    """Told of a lost rank when so many micro-batches have been asked for."""

    def __init__(self, after: int) -> None:
        self._after = after

    def is_broken(self) -> bool:
        self._after -= 1
        return self._after < 0


@pytest.mark.parametrize("after", [0, 1, 4])
def test_no_micro_batch_begins_after_a_rank_died(after: int) -> None:
    rounds = DriverRounds(_Client(after), rank_info({}))  # type: ignore[arg-type]
    begun: list[int] = []
    with pytest.raises(Exception, match="lost a rank") as caught:
        begun.extend(rounds.guard_parts(range(8)))
    assert rounds.is_over(caught.value)
    assert begun == list(range(after))


def test_a_round_that_is_whole_gives_all_of_them() -> None:
    rounds = DriverRounds(_Client(8), rank_info({}))  # type: ignore[arg-type]
    assert list(rounds.guard_parts(range(8))) == list(range(8))


class _Breaking:
    """Told that a rank is gone while it meets the others."""

    def is_broken(self) -> bool:
        return False

    def join(self, why: str, text: str, step: int) -> Place:
        return Place(1, 0, 2, 0, 2, 0, 1, "localhost", "lo", "127.0.0.1:1/t/1", 10)


def test_connections_opened_after_a_rank_died_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Breaking()
    rounds = DriverRounds(client, rank_info({}))  # type: ignore[arg-type]
    ends: list[bytes] = []

    def begin_session() -> None:
        client.wake()  # type: ignore[attr-defined]
        for _ in range(2):
            with socket.create_connection(server.getsockname(), timeout=TIMEOUT_S) as mine, server.accept()[0]:
                ends.append(mine.recv(1))  # of a rank that will never speak
        raise ConnectionError("the end")

    monkeypatch.setattr("hvdtrain.comm.horovod.begin_session", begin_session)
    monkeypatch.setattr("hvdtrain.comm.rounds.change_variables", lambda variables: None)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ConnectionError, match="the end"):
        rounds._meet(client.join("", "", 0))
    assert ends == [b"", b""]


def test_a_rank_that_does_not_leave_a_round_is_reported_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's shutdown may never end: the driver goes by what this rank says of its progress."""
    client = _Breaking()
    rounds = DriverRounds(client, rank_info({}))  # type: ignore[arg-type]
    now_s, seen = [100.0], []
    monkeypatch.setattr("hvdtrain.comm.rounds.time.monotonic", lambda: now_s[0])

    def shutdown() -> None:
        now_s[0] += 61.0
        seen.append(client.heartbeat.idle_s())  # type: ignore[attr-defined]

    monkeypatch.setattr("hvdtrain.comm.horovod.hvd.shutdown", shutdown)
    rounds._leave()
    assert seen == [61.0]


def test_ranks_that_do_not_meet_are_told_how_to_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(process_sets: list[object]) -> None:
        raise ValueError("no rank answers\nmore")

    hvd = "hvdtrain.comm.horovod.hvd"
    monkeypatch.setattr(f"{hvd}.is_initialized", lambda: False)
    monkeypatch.setattr(f"{hvd}.init", init)
    monkeypatch.setattr(f"{hvd}.shutdown", lambda: None)
    monkeypatch.setattr("hvdtrain.comm.horovod.on_host_updates", lambda listener: None)
    monkeypatch.setattr("hvdtrain.comm.rounds.change_variables", lambda variables: None)
    with pytest.raises(UnreachableError, match="could not be initialized") as caught:
        HorovodComm()
    assert "found: no rank answers\n" in str(caught.value) and "--gloo-timeout-seconds 300" in str(caught.value)
    rounds = StockRounds(SoloComm())
    rounds.enter("started")
    with pytest.raises(UnreachableError, match="joining the next round failed: no rank answers"):
        rounds.enter("changed")
