"""The keys of a round: an early request waits, a late one is refused."""

from __future__ import annotations

import asyncio
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.launch.agent_link import Readers, Relay, packed, unpacked
from hvdtrain.launch.rendezvous import ABSENT, FOUND, GONE, MOST_BYTES, RoundStore
from hvdtrain.runtime import channel as lines
from tests.support.launch import TIMEOUT_S


class Asking:
    """A store of round 1, and the requests to it."""

    def __init__(self, number: int = 1, **keys: bytes) -> None:
        self.store = RoundStore()
        self.store.open(number, keys)
        self.asked: list[asyncio.Task[tuple[int, bytes]]] = []

    async def ask(self, key: str, number: int = 1, wait_s: float = TIMEOUT_S) -> bool:
        """Whether there is an answer at once."""
        self.asked.append(asyncio.create_task(self.store.get(number, key, wait_s), name=key))
        await asyncio.sleep(0)
        return self.asked[-1].done()


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("xyz")), max_size=30))
def test_every_request_is_answered_by_the_value(events: list[tuple[bool, str]]) -> None:
    async def run() -> None:
        asking, put = Asking(), set()
        for is_put, key in events:
            if is_put:
                assert asking.store.put(1, key, f"value of {key}".encode())
                put.add(key)
            else:
                assert await asking.ask(key) == (key in put)
        found = [one for one in asking.asked if one.get_name() in put]
        assert await asyncio.gather(*found) == [(FOUND, f"value of {one.get_name()}".encode()) for one in found]
        asking.store.open(0, {})
        gone = [one for one in asking.asked if one.get_name() not in put]
        assert await asyncio.gather(*gone) == [(GONE, b"")] * len(gone)

    asyncio.run(run())


def test_rounds_do_not_share_keys() -> None:
    async def run() -> None:
        asking = Asking(key=b"old")
        assert not await asking.ask("other")
        asking.store.open(2, {"own": b"new"})
        assert await asking.ask("key") and await asking.ask("own", 2) and not await asking.ask("key", 2, wait_s=0.01)
        assert await asyncio.gather(*asking.asked) == [(GONE, b""), (GONE, b""), (FOUND, b"new"), (ABSENT, b"")]
        assert not asking.store.put(1, "key", b"late")

    asyncio.run(run())


def test_without_a_round_nothing_is_kept() -> None:
    store = Asking(0, key=b"value").store
    assert not store.put(0, "key", b"value")
    assert asyncio.run(store.get(0, "key", TIMEOUT_S)) == (GONE, b"")


def test_the_addresses_of_a_thousand_ranks_travel_small() -> None:
    """As Gloo puts them: the socket's address of the rank in 128 bytes, the number of the pair in 8."""
    value = b"".join(struct.pack("<HH124xq", 2, 4711, 5000 + pair) for pair in range(1023))
    assert 1 << 16 < len(value) <= MOST_BYTES
    assert unpacked(packed(value)) == value and len(packed(value)) < len(value) / 10
    assert len(unpacked(packed(bytes(MOST_BYTES + 1)))) == MOST_BYTES


def _relay() -> tuple[list[tuple[str, int, dict[str, str]]], Relay]:
    """What a relay has sent, and the relay."""
    sent: list[tuple[str, int, dict[str, str]]] = []
    return sent, Relay(
        lambda kind, *, round, keys: sent.append((kind, round, keys)),
        lambda host, kind, *, round, keys: sent.append((f"{kind} {host}", round, keys)),
    )


def _keys(local: list[int]) -> dict[str, str]:
    """Those of a round with some ranks on each host; ranks take turns on hosts, as after a change of hosts."""
    places = [(host, number) for number in range(max(local)) for host, count in enumerate(local) if number < count]
    keys, across = {}, [sum(number < count for count in local) for number in range(max(local))]
    for rank, (host, number) in enumerate(places):
        cross_rank = sum(number < count for count in local[:host])
        facts = (rank, len(places), number, local[host], cross_rank, across[number])
        keys[f"rank_and_size/h{host}:{number}"] = ",".join(map(str, facts))
    return keys


@pytest.mark.parametrize("local", [[1, 1], [2, 2, 2], [3, 1, 2]])
def test_a_host_gets_what_its_ranks_read(local: list[int]) -> None:
    """Of the values of each communicator, which has 136 bytes of a rank for each other rank."""
    keys = _keys(local)
    readers, chooser = Readers(keys), random.Random(0)
    ranks = [(key.partition("/")[2].partition(":")[0], *map(int, value.split(","))) for key, value in keys.items()]
    for scope, members in [
        ("global", {rank: host for host, rank, *_ in ranks}),
        *((f"cross_{n}", {across: host for host, _, _, own, _, across, _ in ranks if own == n}) for n in range(3)),
    ]:
        for own in members:
            value = chooser.randbytes(136 * (len(members) - 1))
            parts = readers.divide(f"{scope}/{own}", value)
            if not value:
                assert parts == {"": packed(b"")}
                continue
            assert parts.keys() == {host for rank, host in members.items() if rank != own}
            for reader, host in members.items():
                slot = 136 * (reader - (reader > own))
                found = unpacked(parts[host]) if reader != own else value
                assert len(found) == len(value)
                assert found[slot : slot + 136] == value[slot : slot + 136]
            lengths = [len(part) for part in parts.values()]
            assert max(lengths) < 2 * 136 * max(local) + 40, "and no more"


@pytest.mark.parametrize("key", ["global/rank_1", "local_h0/0", "global_other/0", "cross_7/1"])
def test_other_values_go_to_all(key: str) -> None:
    assert Readers(_keys([2, 2])).divide(key, b"h1") == {"": packed(b"h1")}
    assert Readers(_keys([2, 2])).divide("global/0", b"not a multiple") == {"": packed(b"not a multiple")}


class TestRelay:
    def test_what_is_divided_goes_to_its_host_alone(self) -> None:
        sent, relay = _relay()
        relay.open(1, {})
        relay.put(1, "a", {"h0": "of h0", "h1": "of h1"})
        relay.put(1, "b", {"h1": "more"})
        relay.put(1, "c", {"": "for all"})
        relay.flush()
        assert sent[1:] == [
            ("keys h0", 1, {"a": "of h0"}),
            ("keys h1", 1, {"a": "of h1", "b": "more"}),
            ("keys", 1, {"c": "for all"}),
        ]

    def test_a_stored_value_goes_to_all_in_one_message(self) -> None:
        sent, relay = _relay()
        relay.open(1, {"rank_and_size/a:0": "0,2"})
        for key in "xyz":
            relay.put(1, key, {"": f"value of {key}"})
        relay.put(2, "late", {"": "of another round"})
        assert sent == [("open", 1, {"rank_and_size/a:0": "0,2"})]
        relay.flush()
        relay.flush()
        assert sent[1:] == [("keys", 1, {key: f"value of {key}" for key in "xyz"})]

    def test_what_waits_when_the_stores_close_is_not_sent(self) -> None:
        sent, relay = _relay()
        relay.open(2, {})
        relay.put(2, "x", {"": "waits"})
        relay.open(0, {})
        relay.flush()
        relay.put(2, "x", {"": "late"})
        relay.flush()
        assert sent == [("open", 2, {}), ("open", 0, {})]

    def test_no_message_is_longer_than_a_line_may_be(self) -> None:
        sent, relay = _relay()
        relay.open(1, {})
        for number in range(250):
            relay.put(1, f"small {number}", {"": "x" * 5000})
        relay.put(1, "largest", {"": packed(random.Random(0).randbytes(MOST_BYTES))})
        relay.flush()
        lengths = [len(lines.encode_message(kind, {"keys": keys})) for kind, _, keys in sent]
        assert len(lengths) > 2 and max(lengths) < lines.MOST_BYTES
        assert sum(len(keys) for _, _, keys in sent) == 251

    def test_values_share_a_message_until_it_is_full(self) -> None:
        """Sixteen values of 64 KiB fill a message; what an abandoned round has queued does not count."""
        sent, relay = _relay()
        value = "x" * (1 << 16)
        relay.open(1, {})
        for number in range(15):
            relay.put(1, f"abandoned {number}", {"": value})
        relay.open(2, {})
        for number in range(40):
            relay.put(2, f"key {number}", {"": value})
        relay.flush()
        opened, other, *messages = sent
        assert (opened[0], other[0]) == ("open", "open")
        assert [len(keys) for _, _, keys in messages] == [16, 16, 8]
        assert [key for _, _, keys in messages for key in keys] == [f"key {number}" for number in range(40)]
