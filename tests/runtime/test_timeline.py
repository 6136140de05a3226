"""When Horovod's Timeline is recorded: for all that may be known before Horovod starts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config.windows import ALL, OFF, Window
from hvdtrain.install.record import BuildRecord
from hvdtrain.runtime import environment, tuning
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.tuning import AUTO_WINDOW, RECORD, TimelinePlan, decide, prepare_timeline, without_our_variables

ALONE = RankInfo()
ONE = RankInfo("openmpi", 0, 1, 0, 1)
TWO = RankInfo("openmpi", 0, 2, 0, 2)
TWO_HOSTS = RankInfo("openmpi", 0, 4, 0, 2)
ROOMY = HostFacts(cores=8, own_cores=8)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MINE = {"HOROVOD_TIMELINE": "mine.json"}
DYNAMIC = {"HOROVOD_TIMELINE": "DYNAMIC"}


SPINS, SLEEPS = False, True
"""What the writer's thread of an installed Horovod does when it has nothing to write."""


@pytest.mark.parametrize(
    ("quiet", "wanted", "info", "host", "environ", "kind", "window", "reason"),
    [
        (SPINS, "off", TWO, ROOMY, ONE_THREAD, "off", OFF, ""),
        (SPINS, "auto", TWO, ROOMY, ONE_THREAD, "window", AUTO_WINDOW, ""),
        (SPINS, "auto", TWO, ROOMY, {}, "spans", OFF, "use them all"),
        (SPINS, "auto", TWO, HostFacts(cores=2, own_cores=2), ONE_THREAD, "spans", OFF, "use them all"),
        (SPINS, "auto", TWO, HostFacts(cores=8, quota=True), ONE_THREAD, "spans", OFF, "quota"),
        (SPINS, "auto", TWO, HostFacts(cores=8, gpus=2), ONE_THREAD, "spans", OFF, "GPU"),
        (SPINS, "auto", TWO_HOSTS, ROOMY, ONE_THREAD, "spans", OFF, "several hosts"),
        (SPINS, "auto", ONE, ROOMY, ONE_THREAD, "spans", OFF, "one rank"),
        (SPINS, "auto", TWO, ROOMY, ONE_THREAD | {"HVDTRAIN_CHANNEL": "5"}, "spans", OFF, "one by one"),
        (SPINS, "auto", ALONE, ROOMY, ONE_THREAD, "spans", OFF, "one process"),
        (SPINS, "auto", TWO, ROOMY, ONE_THREAD | MINE, "theirs", OFF, "mine.json"),
        (SPINS, "auto", TWO, ROOMY, ONE_THREAD | DYNAMIC, "theirs", OFF, "DYNAMIC"),
        (SPINS, "3:5", TWO, ROOMY, MINE, "theirs", OFF, "mine.json"),
        (SPINS, "3:5", TWO, ROOMY, DYNAMIC, "window", Window(3, 5), ""),
        (SPINS, "3:5", TWO, ROOMY, {"HOROVOD_TIMELINE": ""}, "window", Window(3, 5), ""),
        (SPINS, "3:5", TWO, HostFacts(cores=2, gpus=2, quota=True), {}, "window", Window(3, 5), ""),
        (SPINS, "3:5", TWO_HOSTS, ROOMY, {}, "window", Window(3, 5), ""),
        (SPINS, "all", TWO, HostFacts(cores=2), {}, "window", ALL, ""),
        (SPINS, "all", ALONE, ROOMY, {}, "spans", OFF, "one process"),
        (SLEEPS, "auto", TWO, ROOMY, ONE_THREAD, "window", AUTO_WINDOW, ""),
        (SLEEPS, "auto", TWO, ROOMY, {}, "window", AUTO_WINDOW, ""),
        (SLEEPS, "auto", TWO, HostFacts(cores=1, own_cores=1, quota=True), {}, "window", AUTO_WINDOW, ""),
        (SLEEPS, "auto", TWO, HostFacts(cores=8, gpus=2), {}, "spans", OFF, "GPU"),
        (SLEEPS, "auto", TWO_HOSTS, ROOMY, {}, "spans", OFF, "several hosts"),
        (SLEEPS, "auto", TWO, ROOMY, MINE, "theirs", OFF, "mine.json"),
    ],
)
def test_what_is_recorded(quiet, wanted, info, host, environ, kind, window, reason) -> None:  # type: ignore[no-untyped-def]
    plan = decide(wanted, Facts(info, host, already=environ), quiet=quiet)
    assert (plan.kind, plan.window) == (kind, window)
    assert reason in plan.reason and bool(reason) == bool(plan.reason)
    assert plan.quiet == (quiet and kind == "window")


@settings(max_examples=50)
@given(
    *(st.integers(1, 8), st.integers(1, 64), st.booleans(), st.booleans()),
    *(st.sampled_from(["", "1", "2", "9"]), st.booleans()),
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
    monkeypatch.setattr(tuning, "installed", lambda: BuildRecord("0.28.1"))
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
    ("record", "quiet"), [(None, False), (BuildRecord("0.28.1"), False), (BuildRecord("0.28.1", quiet=True), True)]
)
def test_which_horovod_is_installed_decides(
    record: BuildRecord | None, quiet: bool, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "installed", lambda: record)
    monkeypatch.setattr(tuning, "read_host", lambda variables: HostFacts(cores=2, own_cores=2))
    plan = prepare_timeline("auto", TWO)
    assert (plan.kind, plan.window, plan.quiet) == (("window", AUTO_WINDOW, True) if quiet else ("spans", OFF, False))
    assert (tuning.TIMELINE in variables) == quiet


@pytest.mark.parametrize("theirs", ["mine.json", "DYNAMIC", ""])
def test_the_users_own_value_stays_theirs(theirs: str, variables: dict[str, str]) -> None:
    variables["HOROVOD_TIMELINE"] = theirs
    for wanted in ("off", "auto", "2:3"):
        prepare_timeline(wanted, TWO)
        assert variables == {"HOROVOD_TIMELINE": theirs}
