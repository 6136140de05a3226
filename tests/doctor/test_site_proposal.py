"""``hvdtrain doctor --write-site``: what the programs of a scheduler say, and the profile that is proposed from it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import doctor
from hvdtrain.cli.launch import merge
from hvdtrain.cli.launch_options import parse
from hvdtrain.doctor.facts.machine import Interface, Network, RdmaPort
from hvdtrain.doctor.site_proposal import Nodes, Scheduler, SiteFacts, pbs, propose_site, slurm
from hvdtrain.files import create_text
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.site import Site, parse_site
from hvdtrain.runtime.environment import RankInfo
from tests.doctor.facts import DOCKER0, ETH0, LO
from tests.support.doctor import program
from tests.support.jobs import MPICH, OPEN_MPI_4

SINFO = """\
cpu|128|515000|(null)|cn[001-300]
gpu*|56+|1031000+|gpu:a100:4(S:0-1),nic:2|gn[01-02],login1
gpu*|64|515000|gpu:a100_3g.20gb:4,gpu:a100:2|gn03
sinfo: error: one|more
big|96|3000000|gpu:8(S:0,1)|bn1
"""
PBSNODES = """\
x1001c0
     Mom = x1001c0.hsn
     state = free
     resources_available.mem = 527672492kb
     resources_available.ncpus = 64
     resources_available.ngpus = 4
     resources_assigned.ncpus = 8

x1001c1
     resources_available.mem = 500gb
     resources_available.ncpus = 32
     resources_available.ngpus = unlimited
"""
WHOLE = SiteFacts(
    {"LOADEDMODULES": "gcc/12:openmpi/4.1.8", "UCX_TLS": "rc,cuda", "NCCL_API_KEY": "hidden", "HOME": "/x"},
    slurm(SINFO),
    Machine((OPEN_MPI_4,), "openmpi", slurm_mpi=("none", "pmi2", "pmix_v4")),
    Network(
        "login1.alex.example",
        interfaces=(LO, ETH0, DOCKER0, Interface("ib0", "10.1.0.1", mbit=200_000)),
        route="eth0",
        rdma=(
            RdmaPort("mlx5_0", 1, True, "InfiniBand"),
            RdmaPort("mlx5_1", 1, False, "InfiniBand"),
            RdmaPort("mlx5_2", 2, True, "InfiniBand"),
            RdmaPort("bond", 1, True, "Ethernet"),
        ),
    ),
)
NOTHING = SiteFacts({}, Scheduler(), Machine(), Network("vm", interfaces=(LO,)))


def accepted(site: Site) -> dict[str, Any]:
    return vars(merge(site, [], parse([])))


def test_sinfo_is_read() -> None:
    found = slurm(SINFO)
    assert (found.target, found.queue) == ("slurm", "gpu")
    nodes = [(one.queue, one.cpus, one.memory_mib, one.gpus) for one in found.nodes]
    assert nodes == [("cpu", 128, 515000, 0), ("gpu", 56, 1031000, 4), ("gpu", 64, 515000, 6), ("big", 96, 3000000, 8)]
    assert found.nodes[1].names == ("gn01", "gn02", "login1")
    assert slurm("sinfo: error: resolve_ctls_from_dns_srv: Unknown host") == Scheduler("slurm", "sinfo")


def test_pbs_is_read() -> None:
    found = pbs("Server: pbs\n    default_queue = workq\n", PBSNODES)
    assert (found.target, found.queue) == ("pbs", "workq")
    assert found.nodes == (Nodes(("x1001c0",), 64, 515305, 4), Nodes(("x1001c1",), 32, 512000, 0))
    assert pbs("", "") == Scheduler("pbs", found.source)


@pytest.mark.parametrize("facts", [WHOLE, NOTHING], ids=["all", "nothing"])
def test_launch_accepts_what_is_proposed(facts: SiteFacts) -> None:
    """Also after each line that was left out is put in."""
    text = propose_site(facts)
    accepted(parse_site(text.encode(), Path("a.yaml")))
    lines = [
        line.replace("# ", "", 1) if line.lstrip(" #").split(":")[0] in _LEFT_OUT else line for line in text.split("\n")
    ]
    accepted(parse_site("\n".join(lines).encode(), Path("a.yaml")))


_LEFT_OUT = ("to", "queue", "account", "mem", "cpus_per_rank", "interface", "pmi", "NCCL_IB_HCA", "modules", "setup")


def test_values_of_the_proposal() -> None:
    text = propose_site(WHOLE)
    site = parse_site(text.encode(), Path("alex.yaml"))
    found = accepted(site)
    assert (found["queue"], found["mem"], found["cpus_per_rank"]) == ("gpu", 502 << 10, 10)
    assert (found["interface"], found["pmi"], found["to"]) == ("ib0", "pmix_v4", "auto")
    assert site.environment == {"UCX_TLS": "rc,cuda"} and site.modules == ("gcc/12", "openmpi/4.1.8")
    assert "hidden" not in text and "# NCCL_IB_HCA: =mlx5_0:1,mlx5_2:2\n" in text, "the active ports"
    assert "64 CPUs and 6 GPUs" in text and "with GPUs: big" in text
    assert all(site.matches(host) for host in ("login7", "gn44", "cn1.x")) and not site.matches("other")
    nothing = parse_site(propose_site(NOTHING).encode(), Path("alex.yaml"))
    assert nothing == Site("alex", Path("alex.yaml"), hosts=("vm",))


def test_awkward_names_stay_what_they_are() -> None:
    environ = {"NCCL_X": "0123", "UCX_Y": "a: b # c", "NCCL_Z": "no", "LOADEDMODULES": "1.0:on"}
    text = propose_site(SiteFacts(environ, slurm("0123*|8|4096|gpu:2|007"), Machine(), Network("12")))
    site = parse_site(text.encode(), Path("alex.yaml"))
    assert site.environment == {"NCCL_X": "0123", "UCX_Y": "a: b # c", "NCCL_Z": "no"}
    assert site.modules == ("1.0", "on") and site.hosts == ("12", "007")
    assert accepted(site)["queue"] == "0123" and accepted(site)["mem"] == 4096


def test_an_mpi_without_pmi_is_left_out() -> None:
    machine = Machine((MPICH,), "mpich", slurm_mpi=("none", "pmix"))
    text = propose_site(SiteFacts({}, Scheduler("slurm", "sinfo"), machine, Network("a")))
    assert "  # srun --mpi=list has none, pmix, and Horovod uses MPICH 5.0.2\n  # pmi: pmix\n" in text


@pytest.mark.parametrize(
    ("programs", "queue"),
    [
        ({"sinfo": SINFO, "srun": "MPI plugin types are...\n\tpmix\n\tnone"}, "gpu"),
        ({"qstat": "Server: a\n    default_queue = workq", "pbsnodes": PBSNODES}, "workq"),
        ({"bparams": "Default Queues:  normal idle\nMBD_SLEEP_TIME used for calculations:  20 seconds"}, "normal"),
    ],
)
def test_a_file_is_written_once(
    programs: dict[str, str],
    queue: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From programs on PATH alone: this machine may have those of another scheduler."""

    def run(*options: str) -> tuple[int, str]:
        return doctor.main(["--write-site", *options]), capsys.readouterr().out

    for name, says in programs.items():
        program(tmp_path / "bin", name, says)
    (tmp_path / "bin/cat").symlink_to(str(shutil.which("cat")))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "prepare", lambda: (RankInfo(), []))
    status, out = run("my site.yaml")
    assert status == 0 and "hvdtrain launch --site 'my site.yaml' --dry-run" in out
    text = Path("my site.yaml").read_text()
    assert f"  queue: {queue}\n" in text and ("  pmi: pmix\n" in text) == ("srun" in programs)
    status, out = run("my site.yaml")
    assert status == 2 and "File exists" in out and Path("my site.yaml").read_text() == text
    for options, said in ((["site"], "NAME.yaml"), (["b.yaml", "--hosts", "a"], "omit --hosts")):
        status, out = run(*options)
        assert status == 2 and said in out and not Path(options[0]).exists()


def test_only_the_owner_may_write_a_new_file(tmp_path: Path) -> None:
    """A profile that others can write would be refused."""
    before = os.umask(0)
    try:
        create_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644 and (tmp_path / "a").read_text() == "text"
    (tmp_path / "b").symlink_to(tmp_path / "c")
    for name in ("a", "b"):
        with pytest.raises(FileExistsError):
            create_text(tmp_path / name, "other")
    with pytest.raises(UnicodeEncodeError):
        create_text(tmp_path / "d", "\udcff")
    assert not (tmp_path / "d").exists() and not (tmp_path / "c").exists()
