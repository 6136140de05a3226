"""Which cores the ranks of a host get, on made-up machines, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.runtime.host import (
    Binding,
    Seat,
    bind_to_gpus,
    binding_map,
    cores_near,
    cpu_list,
    cpu_ranges,
    describe_map,
    numa_domains,
    problems,
)
from tests.support.sysfs import DGX_GPUS, GRACE, GRACE_GPUS, SOCKETS, dgx_h100, gh200

CPUS = st.frozensets(st.integers(0, 63), min_size=1)


def on_gpus(root: Path, gpus: Sequence[str], allowed: Sequence[str], *, insist: bool = False) -> list[Binding]:
    near = (cores_near(gpu.upper(), root / "sys") for gpu in gpus)
    return bind_to_gpus([Seat(cpu_list(a), n) for a, n in zip(allowed, near, strict=True)], insist=insist)


def cores(bindings: Sequence[Binding]) -> list[str]:
    return [cpu_ranges(binding.cpus) for binding in bindings]


@pytest.mark.parametrize(
    ("gpus", "allowed", "expected"),
    [
        (DGX_GPUS, "0-223", [SOCKETS[0]] * 4 + [SOCKETS[1]] * 4),
        (DGX_GPUS[4:5], "0-223", [SOCKETS[1]]),
        (DGX_GPUS[:2], "0-13,56-69", ["0-13", "0-13"]),  # the mask of a launcher is never widened
    ],
)
def test_ranks_of_a_dgx_get_the_socket_of_their_gpu(
    gpus: Sequence[str], allowed: str, expected: list[str], tmp_path: Path
) -> None:
    found = on_gpus(dgx_h100(tmp_path), gpus, [allowed] * len(gpus))
    assert cores(found) == expected
    assert not any(binding.kept for binding in found)


@pytest.mark.parametrize("superchips", [1, 4])
def test_ranks_of_gh200_get_their_superchip(superchips: int, tmp_path: Path) -> None:
    root = gh200(tmp_path, superchips)
    assert numa_domains(root / "sys") == [cpu_list(cpus) for cpus in GRACE[:superchips]]
    whole = f"0-{72 * superchips - 1}"
    assert cores(on_gpus(root, GRACE_GPUS[:superchips], [whole] * superchips)) == list(GRACE[:superchips])


@pytest.mark.parametrize(
    ("allowed", "insist", "bound", "why"),
    [
        ("56-71", False, False, "none of the cores near their GPUs (0-55,112-167)"),
        ("56-71", True, False, "none of"),
        ("55-70", False, False, "may use only 1 of"),
        ("55-70", True, True, ""),
        ("48-63", False, True, ""),
    ],
)
def test_a_rank_with_few_cores_near_its_gpu_keeps_its_mask(
    allowed: str, insist: bool, bound: bool, why: str, tmp_path: Path
) -> None:
    (found,) = on_gpus(dgx_h100(tmp_path), DGX_GPUS[:1], [allowed], insist=insist)
    assert why in found.kept and bool(found.kept) != bound
    assert cores([found]) == [cpu_ranges(cpu_list(allowed) & cpu_list(SOCKETS[0])) if bound else allowed]
    (unknown,) = on_gpus(tmp_path, ["0001:00:00.0"], [allowed], insist=insist)
    assert cores([unknown]) == [allowed] and "does not list" in unknown.kept


@settings(max_examples=50)
@given(st.lists(st.tuples(CPUS, st.frozensets(st.integers(0, 63))), min_size=1, max_size=8), st.booleans())
def test_cores_near_a_gpu_are_within_the_mask(ranks: list[tuple[frozenset[int], frozenset[int]]], insist: bool) -> None:
    seats = [Seat(*rank) for rank in ranks]
    for seat, binding in zip(seats, bind_to_gpus(seats, insist=insist), strict=True):
        assert cpu_list(cpu_ranges(binding.cpus)) == binding.cpus
        assert binding.cpus and binding.cpus <= seat.allowed
        assert binding.cpus == seat.allowed if binding.kept else binding.cpus <= seat.near
        assert not (insist and binding.kept and seat.allowed & seat.near)


def test_the_map_of_a_dgx_is_two_parts(tmp_path: Path) -> None:
    found = on_gpus(dgx_h100(tmp_path), DGX_GPUS, ["0-223"] * 8)
    found = [Binding(one.cpus, gpu) for one, gpu in zip(found, DGX_GPUS, strict=True)]
    groups = binding_map(["a"] * 8, found)
    second = {"host": "a", "ranks": "4-7", "cores": SOCKETS[1], "gpus": list(DGX_GPUS[4:]), "kept": ""}
    assert groups[1] == second
    assert list(describe_map(groups)) == ["binding: ranks 0-3 on cores 0-55,112-167, ranks 4-7 on cores 56-111,168-223"]
    assert not list(problems(groups))


def test_hosts_that_are_alike_share_a_line_and_problems_name_the_ranks() -> None:
    low, high = Binding(cpu_list("0-3")), Binding(cpu_list("4-7"))
    hosts = [host for host in "abcde" for _ in "12"]
    assert list(describe_map(binding_map([*hosts, "f"], [low, high] * 5 + [high]))) == [
        "binding on a, b, c and 2 more: local rank 0 on cores 0-3, local rank 1 on cores\n  4-7",
        "binding on f: local rank 0 on cores 4-7",
    ]
    far = Binding(cpu_list("0-3"), kept="they may use none of the cores near their GPUs (4-7)")
    groups = binding_map(list("aabb"), [low, far, far, low])
    (problem,) = problems(groups)
    assert problem.startswith(f"ranks 1-2 are not bound to cores: {far.kept}")
    assert not list(describe_map([]))
