"""``hvdtrain launch --site``: a profile's options, variables and modules in what is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import ndiff
from pathlib import Path

import pytest

from hvdtrain.cli import launch as command
from hvdtrain.launch.detect import Machine

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


def options(text: str) -> str:
    return f"options: {{{text}}}\nhosts: ['*']"


@pytest.fixture(name="launch")
def at_site(launch: Launch, tmp_path: Path) -> Launch:
    """Call launch with a profile; what it writes to stdout and stderr."""
    file = tmp_path / "sites/alex.yaml"
    file.parent.mkdir()

    def call(
        *words: str, profile: str = PROFILE, more: Mapping[str, str] | None = None, code: int = 0
    ) -> tuple[str, str]:
        file.write_text(profile)
        file.chmod(0o644)
        variables = {"HVDTRAIN_SITES": "sites", **(more or {})}
        out, err = launch(*words, "--dry-run", "--", variables=variables, code=code)
        return out.replace(str(tmp_path), "/home/me"), err

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
    profile = options("queue: site, mem: 9G, notice: 9m")
    out, _ = launch("--to", "slurm", "-np", "2", "--queue", "mine", "--mem=1G", "--notice", "2m", profile=profile)
    assert "--partition=mine\n" in out and "--mem=1024M\n" in out and "B:USR1@120\n" in out
    _, err = launch("-np", "2", "--to", "auto", profile=options("to: slurm"))
    assert "--to openmpi (Open MPI 4.1.8): Horovod uses" in err
    _, err = launch("-np", "2", profile=options("to: slurm"))
    assert "--to slurm" in err


def test_options_that_the_target_does_not_take_are_left_out(launch: Launch) -> None:
    """Neither do those of our own driver choose it; it takes them where it is chosen otherwise."""
    out, err = launch("-H", "a:2,b:2")
    assert out.startswith("NCCL_IB_HCA==mlx5_0:1 OWN='it'\"'\"'s $HOME' UCX_TLS=rc ") and " -x OWN " in out
    assert "--to openmpi" in err and "not loaded here: openmpi/4.1.8 cuda/12" in err
    out, _ = launch("-np", "2", "--to", "hvdtrain", "--elastic", "2:2")
    assert "HOROVOD_SIZE=2" in out and "UCX_TLS=rc" in out
    out, _ = launch("-np", "2", "--to", "mpijob", profile=PROFILE.replace("it's", "$(A)"))
    assert '- {name: "OWN", value: "$$(A) $$HOME"}' in out and 'queue-name: "gpu"' in out and "- launch" not in out
    out, _ = launch("-H", "a:2,b:2", profile=options("gpus_per_node: 8, elastic: 1:2"))
    assert out.startswith("mpirun -np 4 ")
    _, err = launch("-np", "2", "--to", "openmpi", "--queue", "x", code=2)
    assert "--to openmpi does not support --queue" in err


def test_the_users_variables_and_modules_win(launch: Launch) -> None:
    mine = {"UCX_TLS": "tcp", "LOADEDMODULES": "gcc:openmpi/5.0"}
    out, _ = launch("--to", "pbs", "-np", "2", more=mine)
    assert "UCX_TLS=" not in out and "export NCCL_IB_HCA==mlx5_0:1\n" in out
    assert "#PBS -v PATH,HVDTRAIN_SITES,UCX_TLS\n" in out
    assert "module load cuda/12 gcc openmpi/5.0 || exit\n" in out


@pytest.mark.parametrize(
    ("to", "profile", "shown"),
    [
        ("pbs", PROFILE, " launch --site none --to hvdtrain -np 2 (?s:.*) --interface ib0 --env OWN --\n$"),
        ("lsf", options("agents: ssh"), " --agents ssh --"),
    ],
)
def test_a_queued_job_without_mpi_follows_the_profile_once(
    to: str, profile: str, shown: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "detect_machine", lambda variables: Machine())
    assert re.search(shown, launch("--to", to, "-np", "2", profile=profile)[0])


IMAGE = "container: x.sif, container_runtime: apptainer, container_mount: ['/a:/a']"
MOUNT = "container_mount: ['/a:/b'], container_runtime: apptainer"


@pytest.mark.parametrize(
    ("profile", "words", "shown", "hidden"),
    [
        # agents and an interface are for other hosts
        ("agents: srun", "--to hvdtrain -np 2", "localhost: up to 2 rank(s)", "srun"),
        ("interface: ib0", "--to hvdtrain -np 2", "localhost: up to 2 rank(s)", "IFNAME"),
        ("interface: ib0", "--to hvdtrain -H a:1,b:1", "NCCL_SOCKET_IFNAME=ib0", "agents"),
        # mounts wait for an image
        (MOUNT, "--to slurm -np 2", "#SBATCH", "/a:/b"),
        (MOUNT, "--to slurm -np 2 --container x.sif", "/a:/b", "/a:/a"),
        (IMAGE, "--to slurm -np 2", " apptainer exec --bind ", "/a:/b"),
        (IMAGE, "--to slurm -np 2 --container none", "#SBATCH", "apptainer"),
        (IMAGE, "--to hvdtrain -np 2 --container none", "localhost: up to 2 rank(s)", "apptainer"),
        (IMAGE, "--to mpijob -np 2", "MPIJob", "apptainer"),  # which has an image of its own
        ("preflight: 'true'", "--to slurm -np 2", "preflight --write", "apptainer"),
        ("preflight: 'true'", "--to slurm -np 2 --no-preflight", "#SBATCH", "preflight"),
        # hosts of the command line replace a script
        ("discover: ./hosts.sh", "-H a:1 --to hvdtrain", "a: up to 1 rank(s)", "hosts.sh"),
        ("queue: gpu", "--site none --to slurm -np 2", "#SBATCH", "gpu"),
    ],
)
def test_what_a_profile_means_for_a_job(profile: str, words: str, shown: str, hidden: str, launch: Launch) -> None:
    out, err = launch(*words.split(), profile=options(profile))
    assert shown in out and hidden not in out and ("site alex" in err) == ("--site none" not in words)


@pytest.mark.parametrize(
    ("profile", "words", "said"),
    [
        ("agents: srun", "--to hvdtrain -H a:2", "--agents srun"),
        (IMAGE, "--to hvdtrain -np 2", "cannot start the ranks in a container"),
    ],
)
def test_what_the_profile_asks_for_is_never_left_out_silently(
    profile: str, words: str, said: str, launch: Launch
) -> None:
    _, err = launch(*words.split(), profile=options(profile), code=2)
    assert said in err and "--site none" in err


def test_the_documented_profile_is_accepted(launch: Launch) -> None:
    page = (Path(__file__).parents[2] / "docs/launching.md").read_text()
    (profile,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    out, err = launch("--to", "slurm", "--nodes", "2", "--gpus_per_node", "4", profile=profile)
    assert "#SBATCH --constraint=a100\n" in out and "; site alex" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quue: gpu", "no option 'quue'(?s:.*)did you mean queue?"),
        *((f"{name}: 4", f"no option '{name}'") for name in ("np", "dry_run", "site", "help")),
        ("'queue=x --account': y", "no option"),
        ("mem: 4", "--mem"),
        ("queue: a b", "--queue"),
        ("queue: [a, b]", "queue has several values"),
        ("to: torque", "--to: invalid choice"),
        ("tag: yes", "tag is invalid(?s:.*)true or false"),
        ('directive: ["a\\nb"]', "is not a directive"),
        ("pmi: 'x y'", "--pmi"),
        ("env: [A=b]", "--env"),
        ("{container_mount: [/a:/a], container-mount: [/b:/b]}", "container-mount is given twice"),
    ],
)
def test_an_invalid_option_is_refused_with_the_file(text: str, said: str, launch: Launch) -> None:
    _, err = launch("-np", "2", profile=f"hosts: ['*']\noptions:\n  {text}\n", code=2)
    assert "the profile 'sites/alex.yaml': " in err and re.search(said, err), err
