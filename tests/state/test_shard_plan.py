"""Every tensor has one writer, and the writers have about as much to write."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import count_writers, file_group, select_shard, shard_file_name


def _state(sizes: dict[str, list[int]]) -> StateDict:
    tensors = {g: {f"{g}.{n}": torch.zeros(s, dtype=torch.uint8) for n, s in enumerate(of)} for g, of in sizes.items()}
    return StateDict(tensors, {"step": 1})


SIZES = st.fixed_dictionaries(
    {"model": st.lists(st.integers(0, 1000), max_size=30), "optimizer": st.lists(st.integers(0, 1000), max_size=30)}
)


@given(SIZES, st.integers(1, 7))
def test_a_partition_of_about_equal_parts(sizes: dict[str, list[int]], count: int) -> None:
    state = _state(sizes)
    parts = [select_shard(state, number, count) for number in range(count)]
    named = [(g, n) for part in parts for g, tensors in part.tensors.items() for n in tensors]
    assert sorted(named) == sorted((g, n) for g, tensors in state.tensors.items() for n in tensors)
    loads = [sum(t.numel() for tensors in part.tensors.values() for t in tensors.values()) for part in parts]
    assert max(loads) - min(loads) <= max([0, *sizes["model"], *sizes["optimizer"]])
    assert parts[0].tensors.keys() == state.tensors.keys(), "a group without tensors is one all the same"


def test_small_states_have_one_writer() -> None:
    state = _state({"model": [100, 100], "optimizer": []})
    assert count_writers(state.nbytes, 8) == 1
    assert count_writers(state.nbytes, 8, min_bytes=50) == 4
    assert count_writers(state.nbytes, 2, min_bytes=1) == 2
    assert count_writers(0, 8) == 1


@given(st.sampled_from(["model", "optimizer", "a-of-b", "x-00001"]), st.integers(0, 99999), st.integers(2, 99999))
def test_names_of_files_tell_the_group(group: str, number: int, count: int) -> None:
    assert file_group(shard_file_name(group, number, count)) == group
    assert file_group(shard_file_name("model", 0, 1)) == "model"
