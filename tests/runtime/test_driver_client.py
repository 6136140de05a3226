"""A rank's place in an elastic job, assigned by a driver at the other end of a socketpair."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.runtime import driver_client as client_module
from hvdtrain.runtime.channel import Channel
from hvdtrain.runtime.driver_client import EXIT_ALONE, DriverClient, Heartbeat, JobFailed, NoPlace, connect_to_driver

SAVE, TERMINATE, INTERRUPT, CHANGED = range(4)
NOTHING = [0, 0, 0, 0]
PLACE = {
    **{"round": 3, "rank": 1, "size": 4, "local_rank": 1, "local_size": 2, "cross_rank": 0, "cross_size": 2},
    **{"host": "node-a", "interface": "eth0", "store": "127.0.0.1:4711/token/3", "timeout_s": 10},
}


class Driver:
    """The other end, and what was heard there."""

    def __init__(self, client: DriverClient, channel: Channel) -> None:
        self.client = client
        self.channel = channel
        self.messages = channel.messages()

    def hear(self, kind: str) -> dict[str, Any]:
        return next(message for message in self.messages if message["type"] == kind)

    def start_round(self, **changes: Any) -> None:
        self.channel.send("round", **{**PLACE, **changes})
        self.client.join("started")

    def requests(self) -> list[int]:
        """What the rank wants, where no signal came."""
        return self.client.requests(NOTHING, CHANGED, TERMINATE)

    def synchronize_state(self) -> None:
        """Return once what was sent before was heard: answers come in order."""
        self.channel.send("end", why="settled")
        with pytest.raises(NoPlace, match="settled"):
            self.client.join("failed")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(client_module, "BEAT_S", 0.01)
    ours, theirs = socket.socketpair()
    exits: list[int] = []
    client = DriverClient(Channel(ours), exits.append).start()
    yield Driver(client, Channel(theirs))
    client.report_leaving("finished")
    client._channel.close()
    theirs.close()
    assert exits == []


def test_a_rank_requests_and_gets_a_place(driver: Driver) -> None:
    driver.channel._end.sendall(b'not json\n[1]\n{"kind": 1}\n{"type": "weather"}\n')  # is passed over
    driver.channel.send("round", **PLACE)
    place = driver.client.join("started", step=-1)
    asked = driver.hear("join")
    assert (asked["after"], asked["why"], asked["step"]) == (0, "started", -1)
    variables = place.variables()
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1:4711/token/3"
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_SIZE"]) == ("1", "4")
    assert variables["HOROVOD_GLOO_IFACE"] == "eth0"
    driver.channel.send("end", why="too many")
    with pytest.raises(NoPlace, match="too many") as none:
        driver.client.join("failed", "gone", 17)
    assert not isinstance(none.value, JobFailed)
    asked = driver.hear("join")
    assert (asked["after"], asked["text"], asked["step"]) == (3, "gone", 17)
    driver.channel.send("round", **{**PLACE, "interface": ""})
    place = driver.client.join("failed", "x" * (1 << 21))
    assert place.variables()["HOROVOD_GLOO_IFACE"] is None, "any interface"
    assert 1000 < len(driver.hear("join")["text"]) < 10_000, "a very long error is truncated"
    driver.channel.send("end", why="rank 1 was killed", failed=True)
    with pytest.raises(JobFailed, match="rank 1 was killed"):
        driver.client.join("failed")


def test_a_rank_that_hangs_prints_its_stack(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.channel.send("stacks")
    driver.synchronize_state()
    said = capsys.readouterr().err
    assert "where this rank hangs" in said and "test_a_rank_that_hangs_prints_its_stack" in said


def test_a_broken_round_wakes_the_waiting_rank(driver: Driver) -> None:
    cuts: list[int] = []
    driver.client.wake = lambda: cuts.append(driver.client.round)
    driver.start_round()
    assert not driver.client.is_broken()
    driver.channel.send("broken", round=2, why="of an earlier one")
    driver.channel.send("broken", round=3, why="rank 0 is gone")
    driver.synchronize_state()
    assert cuts == [3]
    assert driver.client.is_broken()


def test_a_change_of_the_driver_ends_the_round_at_a_step_boundary(driver: Driver) -> None:
    driver.start_round()
    assert driver.requests() == NOTHING
    driver.channel.send("changed", why="one more")
    while driver.requests()[CHANGED] == 0:
        pass  # it is heard in another thread
    assert not driver.client.is_leaving()
    driver.channel.send("changed", why="no slot", leaves=True)  # crosses the rank's message that it has left
    while not driver.client.is_leaving():
        pass
    driver.start_round(round=4)
    assert driver.requests() == NOTHING  # that was of the round before
    assert not driver.client.is_leaving()


def test_a_change_just_behind_the_place_is_of_the_new_round(driver: Driver) -> None:
    """It is sent only once: a rank that has not read its place yet must not treat it as an old one."""
    driver.channel.send("round", **PLACE)
    driver.channel.send("changed", why="one more")
    while driver.requests()[CHANGED] == 0:
        pass
    driver.client.join("started")
    assert driver.requests()[CHANGED] == 1


def test_sigterm_to_one_rank_lets_it_go_and_the_run_live(driver: Driver) -> None:
    assert driver.client.requests([0, 1, 0, 0], CHANGED, TERMINATE) == [0, 0, 0, 1]
    driver.hear("drain")
    assert driver.client.is_leaving()
    assert driver.requests() == [0, 0, 0, 1]  # until it has left
    driver.start_round()  # there are too few without it: it stays until the driver says so
    assert driver.requests() == NOTHING


def test_a_stop_of_the_job_reaches_the_rank_as_the_signal(driver: Driver) -> None:
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        driver.channel.send("stop", signal="SIGTERM")
        while not came.is_set():
            pass  # handlers run in this thread
    finally:
        signal.signal(signal.SIGTERM, before)
    assert driver.client.requests([0, 1, 0, 0], CHANGED, TERMINATE) == [0, 1, 0, 0]


def test_it_sends_heartbeats(driver: Driver) -> None:
    driver.client.heartbeat = Heartbeat(lambda: 12, lambda: 0.25, lambda: True)
    while not (beat := driver.hear("alive"))["step"]:
        pass
    assert (beat["step"], beat["idle_s"], beat["waiting"]) == (12, 0.25, True)


@pytest.mark.parametrize("leaving", [False, True])
def test_without_its_driver_a_rank_ends_unless_it_is_leaving(leaving: bool) -> None:
    ours, theirs = socket.socketpair()
    codes: list[int] = []
    client = DriverClient(Channel(ours), codes.append)
    if leaving:
        client.report_leaving("finished")
    theirs.close()
    client._listen()
    assert codes == ([] if leaving else [EXIT_ALONE])
    client._channel.close()


def test_no_seat_without_a_channel() -> None:
    assert connect_to_driver({}) is None and connect_to_driver({"HVDTRAIN_CHANNEL": ""}) is None
    for value in ("x", "-1", "99999", str(1 << 70)):
        with pytest.raises(ConfigError, match=f"HVDTRAIN_CHANNEL={value} is no connection"):
            connect_to_driver({"HVDTRAIN_CHANNEL": value})
