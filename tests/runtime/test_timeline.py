"""When Horovod's Timeline is recorded: for all that may be known before Horovod starts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.config.windows import ALL, OFF, Window
from hvdtrain.install.record import BuildRecord
from hvdtrain.runtime import environment, timeline
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.timeline import AUTO_WINDOW, TimelinePlan, decide, prepare_timeline
from hvdtrain.runtime.tuning import RECORD, without_our_variables

ALONE = RankInfo()
ONE = RankInfo("openmpi", 0, 1, 0, 1)
TWO = RankInfo("openmpi", 0, 2, 0, 2)
TWO_HOSTS = RankInfo("openmpi", 0, 4, 0, 2)
ROOMY = HostFacts(cores=8, own_cores=8)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MINE = {"HOROVOD_TIMELINE": "mine.json"}
DYNAMIC = {"HOROVOD_TIMELINE": "DYNAMIC"}


@pytest.mark.parametrize(
    ("wanted", "info", "host", "environ", "kind", "window", "reason"),
    [
        ("off", TWO, ROOMY, ONE_THREAD, "off", OFF, ""),
        ("off", TWO, ROOMY, MINE, "off", OFF, ""),
        ("auto", TWO, ROOMY, ONE_THREAD, "window", AUTO_WINDOW, ""),
        ("auto", TWO, ROOMY, {}, "spans", OFF, "use them all"),
        ("auto", TWO, ROOMY, {"OMP_NUM_THREADS": "4"}, "spans", OFF, "use them all"),
        ("auto", TWO, HostFacts(cores=2, own_cores=2), ONE_THREAD, "spans", OFF, "use them all"),
        ("auto", TWO, HostFacts(cores=8, quota=True), ONE_THREAD, "spans", OFF, "quota"),
        ("auto", TWO, HostFacts(cores=8, gpus=2), ONE_THREAD, "spans", OFF, "GPU"),
        ("auto", TWO_HOSTS, ROOMY, ONE_THREAD, "spans", OFF, "several hosts"),
        ("auto", ONE, ROOMY, ONE_THREAD, "spans", OFF, "one rank"),
        (
            "auto",
            TWO,
            ROOMY,
            ONE_THREAD | {"HVDTRAIN_CHANNEL": "5"},
            "spans",
            OFF,
            "hvdtrain launch starts ranks one by one",
        ),
        ("auto", ALONE, ROOMY, ONE_THREAD, "spans", OFF, "one process"),
        ("auto", TWO, ROOMY, ONE_THREAD | MINE, "theirs", OFF, "mine.json"),
        ("auto", TWO, ROOMY, ONE_THREAD | DYNAMIC, "theirs", OFF, "DYNAMIC"),
        ("3:5", TWO, ROOMY, MINE, "theirs", OFF, "mine.json"),
        ("3:5", TWO, ROOMY, DYNAMIC, "window", Window(3, 5), ""),
        ("3:5", TWO, ROOMY, {"HOROVOD_TIMELINE": ""}, "window", Window(3, 5), ""),
        ("3:5", TWO, HostFacts(cores=2, gpus=2, quota=True), {}, "window", Window(3, 5), ""),
        ("3:5", TWO_HOSTS, ROOMY, {}, "window", Window(3, 5), ""),
        ("3:5", ONE, ROOMY, {}, "window", Window(3, 5), ""),
        ("all", TWO, HostFacts(cores=2), {}, "window", ALL, ""),
        ("all", ALONE, ROOMY, {}, "spans", OFF, "one process"),
    ],
)
def test_what_is_recorded(wanted, info, host, environ, kind, window, reason) -> None:  # type: ignore[no-untyped-def]
    """With a Horovod that has a spinning writer thread."""
    plan = decide(wanted, Facts(info, host, already=environ), quiet=False)
    assert not plan.quiet
    assert (plan.kind, plan.window) == (kind, window)
    assert reason in plan.reason and bool(reason) == bool(plan.reason)
    assert str(plan)


@pytest.mark.parametrize(
    ("info", "host", "environ", "kind", "reason"),
    [
        (TWO, ROOMY, ONE_THREAD, "window", ""),
        (TWO, ROOMY, {}, "window", ""),
        (TWO, HostFacts(cores=1, own_cores=1, quota=True), {}, "window", ""),
        (TWO, HostFacts(cores=8, gpus=2), {}, "spans", "GPU"),
        (TWO_HOSTS, ROOMY, {}, "spans", "several hosts"),
        (ONE, ROOMY, {}, "spans", "one rank"),
        (ALONE, ROOMY, {}, "spans", "one process"),
        (TWO, ROOMY, MINE, "theirs", "mine.json"),
        (TWO, ROOMY, DYNAMIC, "theirs", "DYNAMIC"),
    ],
)
def test_auto_records_if_the_writer_sleeps(info, host, environ, kind, reason) -> None:  # type: ignore[no-untyped-def]
    plan = decide("auto", Facts(info, host, already=environ), quiet=True)
    assert (plan.kind, plan.window) == (kind, AUTO_WINDOW if kind == "window" else OFF)
    assert reason in plan.reason and bool(reason) == bool(plan.reason)
    assert plan.quiet == (kind == "window")


@given(
    st.integers(1, 8),
    st.integers(1, 64),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "1", "2", "9"]),
    st.booleans(),
)
def test_ranks_of_a_host_decide_alike_however_they_are_bound(
    size: int, cores: int, quota: bool, gpus: bool, threads: str, quiet: bool
) -> None:
    """A rank with Horovod's Timeline and one without would break each other's exchange."""
    plans = {
        decide(
            "auto",
            Facts(
                RankInfo("openmpi", rank, size, rank, size),
                HostFacts(cores, own_cores, int(gpus), quota=quota),
                already={"OMP_NUM_THREADS": threads} if threads else {},
            ),
            quiet=quiet,
        )
        for rank in range(size)
        for own_cores in {1, cores, 1 + rank % cores}
    }
    assert len(plans) == 1


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that is not this process's, with a Horovod whose writer's thread spins."""
    monkeypatch.setattr(timeline, "installed", lambda: BuildRecord("0.28.1"))
    found: dict[str, str] = {}
    monkeypatch.setattr(environment, "os", SimpleNamespace(environ=found))
    return found


def test_a_window_is_announced_to_horovod_and_nothing_else_is(variables: dict[str, str]) -> None:
    for wanted in ("off", "auto"):
        prepare_timeline(wanted, TWO_HOSTS)
        assert variables == {}
    assert prepare_timeline("2:3", TWO_HOSTS) == TimelinePlan("window", Window(2, 3))
    assert variables["HOROVOD_TIMELINE"] == "DYNAMIC"


def test_our_variables_are_not_taken_for_the_users(variables: dict[str, str]) -> None:
    variables.update({"THP_MEM_ALLOC_ENABLE": "1", "HOME": "/h", RECORD: json.dumps({"THP_MEM_ALLOC_ENABLE": "1"})})
    prepare_timeline("2:3", TWO)
    assert without_our_variables(variables) == {"HOME": "/h"}
    assert prepare_timeline("auto", TWO_HOSTS).kind == "spans"


@pytest.mark.parametrize(
    ("record", "quiet"),
    [(None, False), (BuildRecord("0.28.1"), False), (BuildRecord("0.28.1", quiet=True), True)],
)
def test_which_horovod_is_installed_decides(
    record: BuildRecord | None, quiet: bool, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "installed", lambda: record)
    monkeypatch.setattr(timeline, "read_host", lambda variables: HostFacts(cores=2, own_cores=2))
    assert prepare_timeline("auto", TWO) == (
        TimelinePlan("window", AUTO_WINDOW, quiet=True)
        if quiet
        else TimelinePlan("spans", reason="its writer's thread needs a core, and the ranks use them all")
    )
    assert (timeline.VARIABLE in variables) == quiet


@pytest.mark.parametrize("theirs", ["mine.json", "DYNAMIC", ""])
def test_the_users_own_value_stays_theirs(theirs: str, variables: dict[str, str]) -> None:
    variables["HOROVOD_TIMELINE"] = theirs
    for wanted in ("off", "auto", "2:3"):
        prepare_timeline(wanted, TWO)
        assert variables == {"HOROVOD_TIMELINE": theirs}
