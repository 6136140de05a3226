"""Which rank a process is, by the variables that launchers really set; what its launcher exposes."""

from __future__ import annotations

import dataclasses
import itertools
import os
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import LaunchError
from hvdtrain.runtime import environment
from hvdtrain.runtime.channel import VARIABLE
from hvdtrain.runtime.environment import LAUNCHERS, RankInfo, environ, rank_info, rank_label
from hvdtrain.runtime.interfaces import describe_exposure
from tests.runtime.launched import LAUNCHED, mpich, one_task, open_mpi_4, salloc_shell, sbatch_script, srun


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("variables", "launcher"), LAUNCHED.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_each_launcher_tells_its_ranks_apart(variables, launcher: str, rank: int) -> None:
    assert rank_info(variables(rank), "node") == RankInfo(launcher, rank, 2, rank, 2, "node")


def test_without_a_launcher_there_is_one_rank() -> None:
    for shell in ({}, salloc_shell(), sbatch_script()):
        assert rank_info(shell, "node") == RankInfo("none", 0, 1, 0, 1, "node")


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], int]:
    """Ranks on each host, and one rank."""
    hosts = draw(st.lists(st.integers(1, 70), min_size=1, max_size=12))
    return hosts, draw(st.integers(0, sum(hosts) - 1))


def place(hosts: list[int], rank: int) -> tuple[int, int]:
    """Which host a rank is on, and its place there, when hosts are filled in order."""
    node = 0
    while rank >= hosts[node]:
        rank -= hosts[node]
        node += 1
    return node, rank


def compressed(hosts: list[int]) -> str:
    """As Slurm writes it: runs of equal numbers as N(xM)."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(hosts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


@settings(max_examples=60)
@given(jobs(), st.sampled_from(LAUNCHERS))
def test_the_variables_of_a_launcher_are_parsed(job, launcher) -> None:
    hosts, rank = job
    node, local = place(hosts, rank)
    numbers = {launcher.rank: rank, launcher.size: sum(hosts), launcher.local_rank: local}
    variables = dict.fromkeys(launcher.signs, "set") | {name: str(number) for name, number in numbers.items()}
    variables[launcher.local_size] = compressed(hosts) if launcher.node else str(hosts[node])
    if launcher.node:
        variables[launcher.node] = str(node)
    found = rank_info(variables, "h")
    assert found == RankInfo(launcher.name, rank, sum(hosts), local, hosts[node], "h")
    assert rank_label(found) == f"rank {rank}/{sum(hosts)} on h"
    assert found.one_host == (len(hosts) == 1)
    if len(set(hosts)) == 1:
        assert found.hosts == len(hosts)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda line: f"{line.name}-{line.signs[0]}")
@pytest.mark.parametrize("text", [None, "", "two", "-1", "1.5", "99999999999"])
def test_an_invalid_variable_is_named(launcher, text: str | None) -> None:
    whole = dict.fromkeys((*launcher.signs, launcher.rank, launcher.local_rank), "0")
    whole |= {launcher.size: "1", launcher.local_size: "1"}
    whole |= {launcher.node: "0"} if launcher.node else {}
    assert rank_info(whole, "h").launcher == launcher.name
    for variable in sorted(whole.keys() - {"TORCHELASTIC_RUN_ID"}):  # which is no number
        broken = {name: value for name, value in whole.items() if name != variable}
        broken |= {} if text is None else {variable: text}
        if not any(sign in broken for sign in launcher.signs):
            continue  # nothing left that shows a launcher
        with pytest.raises(LaunchError, match=f"{variable} is invalid") as error:
            rank_info(broken, "h")
        assert (error.value.found == "it is not set") == (text is None)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (open_mpi_4(0) | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK"),
        (open_mpi_4(0) | {"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE"),
        (open_mpi_4(0) | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (open_mpi_4(0) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (srun(0) | {"SLURM_NODEID": "1"}, "SLURM_NODEID"),  # no such node
        ({name: text for name, text in mpich(1).items() if name.startswith("PMI_")}, "MPI_LOCALNRANKS"),
    ],
)
def test_numbers_that_do_not_fit_together_are_named(variables: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        rank_info(variables, "h")


OWN = {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", VARIABLE: "3"}
TWO_RANKS = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", **TWO_RANKS}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (one_task() | TORCHRUN, "torchrun"),
        (srun(0) | TORCHRUN | {"WORLD_SIZE": "4"}, "torchrun"),
        ({name: text for name, text in srun(1).items() if name != "SLURM_STEP_NUM_TASKS"}, "srun"),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, "MVAPICH's mpirun"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"}, "a PMIx launcher"),
        ({"PALS_RANKID": "3"}, "Cray's mpiexec"),
    ],
)
def test_ranks_of_a_launcher_that_is_not_understood_do_not_train_alone(variables, launcher: str) -> None:
    info = dataclasses.replace(rank_info(variables, "node"), variables=variables)
    with pytest.raises(LaunchError, match=f"{launcher}(?s:.*)hvdtrain launch -np"):
        environment.refuse_unused_launcher(info)
    environment.refuse_unused_launcher(rank_info({**variables, environment.ALONE: "1"}, "node"))


def test_torchrun_starts_the_ranks_of_an_engine_without_horovod() -> None:
    info = rank_info(srun(0) | TORCHRUN, "node")
    assert (info.launcher, info.rank, info.size, info.local_rank, info.local_size) == ("torchrun", 1, 2, 1, 2)
    environment.refuse_unused_launcher(info, horovod=False)
    with pytest.raises(LaunchError, match=r"--parallel\.engine ddp"):
        environment.refuse_unused_launcher(info)
    assert rank_info(TORCHRUN | {environment.ALONE: "1"}, "node") == RankInfo(host="node")


@pytest.mark.parametrize(
    "variables",
    [
        *(variables(0) for variables in LAUNCHED),
        *({}, salloc_shell(), sbatch_script()),
        {"PMI_SIZE": "2", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"} | OWN,  # our driver's
        open_mpi_4(1) | TWO_RANKS,  # of a script that sets more variables
    ],
)
def test_ranks_of_one_job_are_not_refused(variables) -> None:
    environment.refuse_unused_launcher(rank_info(variables, "node"))


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_exchanges_that_are_not_complete_are_refused(
    value: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_ENABLE_ASYNC_COMPLETION", raising=False)
    if value is not None:
        monkeypatch.setenv("HOROVOD_ENABLE_ASYNC_COMPLETION", value)
    with pytest.raises(LaunchError, match="ASYNC_COMPLETION") if refused else nullcontext():
        environment.refuse_early_completion()


def test_variables_are_written_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_TEST_OLD", "1")
    monkeypatch.setenv("HVDTRAIN_TEST_NEW", "")
    before = environ()
    environment.change_variables({"HVDTRAIN_TEST_OLD": None, "HVDTRAIN_TEST_NEW": "2", "HVDTRAIN_TEST_NEVER": None})
    assert "HVDTRAIN_TEST_OLD" not in os.environ
    assert environ()["HVDTRAIN_TEST_NEW"] == "2"
    assert before["HVDTRAIN_TEST_OLD"] == "1"  # a copy


STOCK = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.5", "HOROVOD_GLOO_RENDEZVOUS_PORT": "40123"}
ELASTIC = {**STOCK, "HOROVOD_ELASTIC": "1"}
OURS = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1:4711/SECRET/3", "HOROVOD_GLOO_RENDEZVOUS_PORT": "0"}


def test_an_elastic_job_of_stock_horovod_is_warned_of_its_rendezvous_and_a_plain_one_of_its_port() -> None:
    text = describe_exposure(ELASTIC)
    assert all(part in text for part in ("10.0.0.5", "40123", "CVE-2024-10190", "CVE-2026-31234", "hvdtrain launch"))
    text = describe_exposure(STOCK)
    assert "40123" in text and "CVE" not in text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMPI_COMM_WORLD_RANK": "0", "HOROVOD_ELASTIC": "1"},
        {**OURS, "HOROVOD_ELASTIC": "1"},
        {**ELASTIC, "HVDTRAIN_CHANNEL": "5"},
    ],
    ids=["alone", "mpirun", "our store", "our driver"],
)
def test_no_warning_where_that_server_is_not_used(environ: dict[str, str]) -> None:
    assert describe_exposure(environ) == ""


@pytest.mark.parametrize(
    ("environ", "gloo", "ours"),
    [
        ({}, False, False),
        ({"OMPI_COMM_WORLD_RANK": "0"}, False, False),
        ({**ELASTIC, "HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "gloo"}, True, False),
        ({"HOROVOD_RANK": "0"}, True, False),
        ({"HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "MPI"}, False, False),
        ({"HVDTRAIN_CHANNEL": "5"}, True, True),
    ],
)
def test_which_jobs_exchange_by_gloo_and_have_our_driver(environ: dict[str, str], gloo: bool, ours: bool) -> None:
    assert (environment.by_gloo(environ), environment.elastic(environ)) == (gloo, ours)
