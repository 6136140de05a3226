"""The keys of a round: who asks early waits, who asks late is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.launch.store import FOUND, GONE, Answer, RoundStore


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("xyz")), max_size=30))
def test_every_request_is_answered_once_by_the_value(events: list[tuple[bool, str]]) -> None:
    store, answers, asked = RoundStore(), [], 0
    store.open(1, {})
    for is_put, key in events:
        if is_put:
            answers += store.put(1, key, f"value of {key}")
        else:
            asked += 1
            answers += store.get("a", asked, 1, key)
    found, gone = list(answers), store.close(1)
    assert sorted(a.request for a in found + gone) == list(range(1, asked + 1))
    assert all(a.status == FOUND for a in found) and all(a.status == GONE for a in gone)
    keys = [key for is_put, key in events if not is_put]
    assert all(a.value == f"value of {keys[a.request - 1]}" for a in found)
    put = {key for is_put, key in events if is_put}
    assert all(keys[a.request - 1] not in put for a in gone)


def test_a_round_sees_nothing_of_another() -> None:
    store = RoundStore()
    store.open(1, {"key": "old"})
    waiting = store.get("a", 1, 1, "other")
    assert waiting == [] and store.open(2, {"own": "new"}) == [Answer("a", 1, GONE)]
    assert store.get("a", 2, 2, "key") == [] and store.get("a", 3, 2, "own") == [Answer("a", 3, FOUND, "new")]
    assert store.put(1, "key", "late") == [] and store.get("a", 4, 1, "key") == [Answer("a", 4, GONE)]


def test_closing_another_round_changes_nothing() -> None:
    store = RoundStore()
    store.open(2, {"key": "value"})
    assert store.close(1) == [] and store.get("a", 1, 2, "key")[0].status == FOUND
