"""``hvdtrain launch --site``: a profile's options, variables and modules in what is started."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from difflib import ndiff
from pathlib import Path

import pytest

from hvdtrain.cli import launch as command
from hvdtrain.launch.detect import Machine
from tests.support.jobs import OPEN_MPI_4

GOLDEN = Path(__file__).with_name("golden")
PROFILE = """\
hosts: [login*]
options:
  queue: gpu
  account: 0123
  mem: 400G
  cpus_per_rank: 14
  interface: ib0
  pmi: pmix_v4
  directive: [--comment=site]
  elastic: 1:8
environment:
  NCCL_IB_HCA: =mlx5_0:1
  OWN: it's $HOME
  UCX_TLS: rc
modules: [openmpi/4.1.8, cuda/12]
setup:
  - . /etc/profile.d/modules.sh
"""
Launch = Callable[..., tuple[str, str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Call launch on a made-up machine; what it writes to stdout and stderr."""
    machine = Machine((OPEN_MPI_4,), "openmpi", programs={"srun": "srun"}, slurm_mpi=("none", "pmix"))
    monkeypatch.setattr(command, "detect_machine", lambda variables: machine)
    monkeypatch.setattr(command, "_found", lambda start: start)
    monkeypatch.setattr("hvdtrain.cli.launch_spec.has_remote_shell", lambda variables: True)
    monkeypatch.setattr(platform, "node", lambda: "login1.site.example")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() or 1000)
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()

    def call(
        *words: str, profile: str = PROFILE, more: Mapping[str, str] | None = None, code: int = 0
    ) -> tuple[str, str]:
        (tmp_path / "sites/alex.yaml").write_text(profile)
        (tmp_path / "sites/alex.yaml").chmod(0o644)
        variables = {"PATH": "/usr/bin:/bin", "HVDTRAIN_SITES": "sites", **(more or {})}
        monkeypatch.setattr(os, "environ", variables)
        assert command.main([*words, "--dry-run", "--"]) == code
        said = capsys.readouterr()
        return said.out.replace(str(tmp_path), "/home/me"), said.err

    return call


@pytest.mark.parametrize("to", ["slurm", "pbs"])
def test_what_a_profile_changes_in_a_script(to: str, launch: Launch) -> None:
    words = ("--to", to, "--nodes", "2", "--gpus_per_node", "4", "--cpus_per_rank=2", "--directive=--comment=mine")
    without, _ = launch("--site", "none", *words)
    words = tuple(word for word in words if word != "--cpus_per_rank=2")
    out, err = launch(*words)
    changes = [line for line in ndiff(without.splitlines(), out.splitlines()) if line[0] in "-+"]
    assert "\n".join(changes) + "\n" == (GOLDEN / f"site-{to}.txt").read_text()
    assert err.endswith("; site alex (sites/alex.yaml)\n")


def test_the_command_line_wins_also_with_a_default(launch: Launch) -> None:
    out, _ = launch("--to", "slurm", "-np", "2", "--queue", "mine", "--mem=1G", "--notice", "2m",
                    profile="options: {queue: site, mem: 9G, notice: 9m}\nhosts: ['*']")  # fmt: skip
    assert "--partition=mine\n" in out and "--mem=1024M\n" in out and "B:USR1@120\n" in out
    _, err = launch("-np", "2", "--to", "auto", profile="options: {to: slurm}\nhosts: ['*']")
    assert "--to openmpi (Open MPI 4.1.8): Horovod uses" in err
    out, _ = launch("-np", "2", profile="options: {to: slurm}\nhosts: ['*']")
    assert "#SBATCH" in out


def test_options_that_the_target_does_not_take_are_left_out(launch: Launch) -> None:
    """Neither do those of our own driver choose it; it takes them where it is chosen otherwise."""
    out, err = launch("-H", "a:2,b:2")
    assert out.startswith("NCCL_IB_HCA==mlx5_0:1 OWN='it'\"'\"'s $HOME' UCX_TLS=rc ") and " -x OWN " in out
    assert "--to openmpi" in err and "not loaded here: openmpi/4.1.8 cuda/12" in err
    out, _ = launch("-np", "2", "--to", "hvdtrain", "--elastic", "2:2")
    assert "HOROVOD_SIZE=2" in out and "UCX_TLS=rc" in out
    out, _ = launch("-np", "2", "--to", "mpijob", profile=PROFILE.replace("it's", "$(A)"))
    assert '- {name: "OWN", value: "$$(A) $$HOME"}' in out and 'queue-name: "gpu"' in out and "- launch" not in out
    out, _ = launch("-H", "a:2,b:2", profile="options: {gpus_per_node: 8, elastic: 1:2}\nhosts: ['*']")
    assert out.startswith("mpirun -np 4 ")
    _, err = launch("-np", "2", "--to", "openmpi", "--queue", "x", code=2)
    assert "--to openmpi does not support --queue" in err


def test_the_users_variables_and_modules_win(launch: Launch) -> None:
    mine = {"UCX_TLS": "tcp", "LOADEDMODULES": "gcc:openmpi/5.0"}
    out, _ = launch("--to", "pbs", "-np", "2", more=mine)
    assert "UCX_TLS=" not in out and "export NCCL_IB_HCA==mlx5_0:1\n" in out
    assert "#PBS -v PATH,HVDTRAIN_SITES,UCX_TLS\n" in out
    assert "module load cuda/12 gcc openmpi/5.0 || exit\n" in out


def test_a_queued_job_without_mpi_follows_the_profile_once(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "detect_machine", lambda variables: Machine())
    out, _ = launch("--to", "pbs", "-np", "2")
    assert " launch --site none --to hvdtrain -np 2 " in out and out.endswith(" --interface ib0 --env OWN --\n")


def test_a_queued_job_without_mpi_has_the_profiles_agents(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "detect_machine", lambda variables: Machine())
    out, _ = launch("--to", "lsf", "-np", "2", profile="options: {agents: ssh}\nhosts: ['*']")
    assert " --agents ssh --" in out


def test_agents_are_for_other_hosts(launch: Launch) -> None:
    out, _ = launch("--to", "hvdtrain", "-np", "2", profile="options: {agents: srun}\nhosts: ['*']")
    assert out.startswith("localhost: up to 2 rank(s)")
    _, err = launch("--to", "hvdtrain", "-H", "a:2", profile="options: {agents: srun}\nhosts: ['*']", code=2)
    assert "--agents srun works only inside an allocation" in err and "--site none leaves them out" in err


def test_a_container_of_the_profile_is_never_left_out_silently(launch: Launch) -> None:
    profile = "options: {container: x.sif, container_runtime: apptainer, container_mount: ['/a:/a']}\nhosts: ['*']"
    assert " apptainer exec --bind " in launch("--to", "slurm", "-np", "2", profile=profile)[0]
    out, _ = launch("--to", "slurm", "-np", "2", "--container", "none", profile=profile)
    assert "apptainer" not in out and "#SBATCH" in out
    _, err = launch("--to", "hvdtrain", "-np", "2", profile=profile, code=2)
    assert "--to hvdtrain cannot start the ranks in a container" in err
    out, _ = launch("--to", "hvdtrain", "-np", "2", "--container", "none", profile=profile)
    assert out.startswith("localhost: up to 2 rank(s)")
    assert "MPIJob" in launch("--to", "mpijob", "-np", "2", profile=profile)[0]


def test_mounts_of_the_profile_wait_for_an_image(launch: Launch) -> None:
    out, _ = launch("--to", "slurm", "-np", "2", profile="options: {container_mount: ['/a:/a']}\nhosts: ['*']")
    assert "#SBATCH" in out


def test_a_flag_of_the_profile_can_be_switched_off(launch: Launch) -> None:
    profile = "options: {preflight: 'true'}\nhosts: ['*']"
    assert "preflight --write" in launch("--to", "slurm", "-np", "2", profile=profile)[0]
    assert "preflight" not in launch("--to", "slurm", "-np", "2", "--no-preflight", profile=profile)[0]


def test_an_interface_of_the_profile_is_not_for_ranks_of_one_host(launch: Launch) -> None:
    profile = "options: {interface: ib0}\nhosts: ['*']"
    assert "NCCL_SOCKET_IFNAME" not in launch("--to", "hvdtrain", "-np", "2", profile=profile)[0]
    assert "NCCL_SOCKET_IFNAME=ib0" in launch("--to", "hvdtrain", "-H", "a:1,b:1", profile=profile)[0]


def test_site_none_uses_none(launch: Launch) -> None:
    out, err = launch("--site", "none", "--to", "slurm", "-np", "2")
    assert "gpu" not in out and "site" not in err


def test_hosts_of_the_command_line_replace_a_script_of_the_profile(launch: Launch) -> None:
    out, _ = launch("-H", "a:1", "--to", "hvdtrain", profile="options: {discover: ./hosts.sh}\nhosts: ['*']")
    assert out.startswith("a: up to 1 rank(s)")


def test_the_documented_profile_is_accepted(launch: Launch) -> None:
    page = (Path(__file__).parents[2] / "docs/launching.md").read_text()
    (profile,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    out, err = launch("--to", "slurm", "--nodes", "2", "--gpus_per_node", "4", profile=profile)
    assert "#SBATCH --constraint=a100\n" in out and "; site alex" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("quue: gpu", "there is no option 'quue'(?s:.*)did you mean queue?"),
        ("np: 4", "there is no option 'np'"),
        ("dry_run: true", "there is no option 'dry_run'"),
        ("site: other", "there is no option 'site'"),
        ("help: true", "there is no option 'help'"),
        ("'queue=x --account': y", "there is no option"),
        ("mem: 4", "argument --mem: '4' is not a size of memory"),
        ("queue: a b", "argument --queue: 'a b' is not one word"),
        ("queue: [a, b]", "options: queue has several values"),
        ("to: torque", "argument --to: invalid choice: 'torque'"),
        ("tag: yes", "options: tag is invalid(?s:.*)true or false"),
        ('directive: ["a\\nb"]', "is not a directive"),
        ("pmi: 'x y'", "argument --pmi"),
        ("env: [A=b]", "argument --env"),
        ("{container_mount: [/a:/a], container-mount: [/b:/b]}", "container-mount is given twice"),
    ],
)
def test_an_invalid_option_is_refused_with_the_file(options: str, said: str, launch: Launch) -> None:
    _, err = launch("-np", "2", profile=f"hosts: ['*']\noptions:\n  {options}\n", code=2)
    assert "the profile 'sites/alex.yaml': " in err
    assert re.search(said, err), err
