"""``hvdtrain launch`` by MPI and by schedulers: what --dry-run shows is what runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hvdtrain.cli import launch as command
from hvdtrain.cli.launch_options import parse
from hvdtrain.config.parse import parse_argv, task_spec
from hvdtrain.errors import USAGE, HvdtrainError
from hvdtrain.install.versions import REMOTE_SHELL, has_remote_shell
from hvdtrain.programs import Finished
from hvdtrain.task.base import load_task_function
from tests.support.gallery import Gallery

SPY = f"""\
#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
WORDS = ("--config", "run it's.yaml", "two\nlines", '$HOME "x"')
Launch = Callable[..., tuple[str, str]]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """Scripts that were handed in, each with its variables; here training checks its arguments in this process."""

    def run(argv: Sequence[str], *, input: str, env: dict[str, str], **_: object) -> SimpleNamespace:
        handed.append((input, env))
        return SimpleNamespace(returncode=0)

    def train(argv: Sequence[str], *_: object, **__: object) -> Finished:
        *words, last = argv[3:]
        assert last == "--print_config"
        try:
            parse_argv(words, load_task_function(task_spec(words)))
        except HvdtrainError as error:
            return Finished(USAGE, "", str(error))
        return Finished(0, "", "")

    handed: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(command, "run_program", train)
    monkeypatch.setattr(command, "output", lambda argv, variables: variables.get("VERSION", "pbs_version = 23"))
    return handed


def test_the_shown_line_is_the_one_that_runs(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell it gives a launcher the same words and variables as the command itself does."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def become(program: str, argv: Sequence[str], variables: dict[str, str]) -> None:
        started.append((list(argv), variables))
        sys.exit(0)

    monkeypatch.setattr("os.execvpe", become)
    asked = ("--to", "openmpi", "-H", "localhost:2,127.0.0.1:2", "--env", "SECRET")
    variables = {"SECRET": "not to be told", "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    shown, _ = launch(*asked, "--dry-run", "--", *WORDS, variables=variables)
    _, said = launch(*asked, "--", *WORDS, variables=variables)
    assert "not to be told" not in shown + said and " -x SECRET " in shown and f"+ {shown.strip()}" in said
    (tmp_path / "bin/mpirun").write_text(SPY)
    by_hand = subprocess.run(["bash", "-c", shown], cwd=tmp_path, env=variables, capture_output=True, text=True)
    hand, own = json.loads(by_hand.stdout), started[0]
    assert hand[0] == own[0][1:] and own[0][-len(WORDS) :] == list(WORDS)
    ours = {"HVDTRAIN_LAUNCH_OPTIONS", "_", "SHLVL", "PWD", "OLDPWD", "PS1", "LC_CTYPE"}
    assert {k: v for k, v in hand[1].items() if k not in ours} == {k: v for k, v in own[1].items() if k not in ours}


def test_the_script_that_is_shown_is_the_one_that_is_handed_in(launch: Launch, submitted: list[Any]) -> None:
    asked = ("--to", "pbs", "--nodes", "2", "--gpus_per_node", "4", "--cpus_per_rank", "2", "--time", "1h30m")
    words = ("--run_dir", "two\nlines", "--data.text", '$HOME "x"')
    shown, _ = launch(*asked, "--dry-run", "--", *words)
    assert not submitted
    launch(*asked, "--", *words)
    ((text, _),) = submitted
    assert text == shown and "#PBS -l walltime=01:30:00" in text and "mpirun -np 8" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--train.step", "3"), "did you mean --train.steps?"),
        (("--config", "not there.yaml"), "'not there.yaml'"),
        (("--seed", "x2"), "x2"),
        (("--seed", "2"), ""),
    ],
)
def test_invalid_training_options_are_not_submitted(
    words: tuple[str, ...], said: str, launch: Launch, submitted: list[Any]
) -> None:
    """It would be found out after hours in a queue."""
    _, err = launch("--to", "pbs", "-np", "1", "--", *words, code=2 if said else 0)
    assert said in err and len(submitted) == (not said)


@pytest.mark.parametrize("to", ["pbs", "slurm"])
def test_a_queued_job_gets_no_secrets(to: str, launch: Launch, submitted: list[Any]) -> None:
    """And nothing of the job of Slurm in which this process may run."""
    variables = {"HF_TOKEN": "not to be told", "HF_HOME": "h", "SLURM_MEM_PER_CPU": "9", "SLURM_JOB_ID": "7"}
    _, err = launch("--to", to, "-np", "1", "--", variables=variables)
    ((text, given),) = submitted
    assert "not to be told" not in f"{given}{text}" and "HF_TOKEN" not in text
    assert given["HF_HOME"] == "h" and "SLURM_MEM_PER_CPU" not in given
    assert "HF_TOKEN" in err
    _, err = launch("--to", to, "-np", "1", "--env", "HF_TOKEN", "--", variables=variables, code=2)
    assert "HF_TOKEN" in err and len(submitted) == 1


def test_a_scheduler_that_is_another_or_not_here_is_named(launch: Launch, submitted: list[Any]) -> None:
    _, err = launch("--to", "pbs", "-np", "1", "--", variables={"VERSION": "Version: 6.1.2"}, code=2)
    assert "Torque and Grid Engine" in err and "Version: 6.1.2" in err
    _, err = launch("--to", "lsf", "-np", "2", "--", code=2)
    assert "no bsub" in err and "--dry-run" in err and not submitted


def test_a_script_activates_the_environment_of_this_shell(launch: Launch) -> None:
    """Modules, and of the variables those that there are."""
    variables = {"LOADEDMODULES": "cuda/12:gcc", "MY_OWN": "1"}
    asked = ("--to", "pbs", "-np", "2", "--nodes", "2", "--env", "MY_OWN", "--dry-run", "--")
    shown, _ = launch(*asked, variables=variables)
    assert "\nmodule load cuda/12 gcc || exit" in shown
    (names,) = (line.removeprefix("#PBS -v ") for line in shown.splitlines() if line.startswith("#PBS -v "))
    assert {"PATH", "MY_OWN"} <= set(names.split(",")) <= {"PATH", *variables}


IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_NTASKS": "10"}


@pytest.mark.parametrize(
    ("asked", "more", "shown"),
    [
        (["--to", "openmpi"], {}, " -np 10 --host n08:4,n09:4,n10:2 "),
        ([], {}, "srun --mpi=pmix --ntasks=10 --nodes=3 "),
        ([], {"SLURM_TASKS_PER_NODE": "4(x3)"}, " --ntasks=12 --nodes=3 --ntasks-per-node=4 "),
        ([], {"SLURM_STEP_ID": "0"}, " --overlap "),
        (["--to", "openmpi", "-H", "a:1"], {}, " -np 1 --host a:1 "),
    ],
)
def test_hosts_of_an_allocation_of_slurm_are_those_of_the_job(
    asked: list[str], more: dict[str, str], shown: str, launch: Launch
) -> None:
    there = {**IN_SLURM, "SLURM_TASKS_PER_NODE": "4(x2),2", **more}
    assert shown in launch(*asked, "--dry-run", "--", variables=there)[0]


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_a_file_of_an_allocation_names_the_hosts(name: str, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\n")
    assert " -np 3 --host a:2,b:1 " in launch("--dry-run", "--", variables={name: str(tmp_path / "hosts")})[0]


def test_without_ssh_open_mpi_needs_none(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks on this host need none; a job on others is refused before it starts, by our own driver, too."""
    monkeypatch.setattr("hvdtrain.cli.launch_spec.has_remote_shell", has_remote_shell)
    off = f"{REMOTE_SHELL[0]}=/bin/false "

    def shown(*hosts: str, **variables: str) -> str:
        bare = {"PATH": f"{tmp_path}/bin", **variables}
        return launch("--to", "openmpi", "--dry-run", *hosts, "--", variables=bare)[0]

    assert off in shown("-np", "2") and off in shown("-H", "localhost:2")
    assert "plm" not in shown("-H", "localhost:1,b:1")
    for target in ("openmpi", "hvdtrain"):
        refused = launch("--to", target, "-H", "b:1", "--", variables={"PATH": f"{tmp_path}/bin"}, code=2)[1]
        assert "no ssh on this machine" in refused and "to start ranks on b" in refused
    assert "plm" not in shown("-np", "2", **{REMOTE_SHELL[0]: "docker exec"})
    (tmp_path / "bin/ssh").touch(0o755)
    assert "plm" not in shown("-np", "2")


def test_a_pod_has_variables_of_its_own(launch: Launch) -> None:
    shown, _ = launch("--to", "mpijob", "-np", "2", "--nodes", "2", "--env", "NOT_HERE", "--dry-run", "--")
    pod = yaml.safe_load(shown)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    words = pod["spec"]["containers"][0]["command"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "-x"] == ["NOT_HERE"]


@pytest.mark.slow
def test_ranks_train_with_the_installed_launcher(gallery: Gallery) -> None:
    """Without --to, by the MPI that Horovod uses; the command to resume is launch again."""
    job = gallery["resumed"]
    out, err = job.notes["out"], job.notes["err"]
    assert "hvdtrain launch: starting 2 rank(s), --to openmpi (Open MPI" in err and "Horovod uses Open MPI" in err
    assert "on 2 rank(s)" in out
    go_on = next(line for line in out.splitlines() if line.strip().startswith("continue"))
    assert shlex.split(go_on)[2:5] == ["launch", "-np", "2"]


MOUNTS = [["--container", "x.sif", "--container_mount", mount] for mount in ("/data", "data:/data", "/data:/data:rw+x")]


def test_np_has_the_short_form_of_mpiexec_and_srun() -> None:
    assert parse(["-n", "3"]).np == parse(["-np", "3"]).np == 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--to", "pbs", "-np", "5", "--nodes", "2"], "cannot be divided evenly"),
        (["--to", "pbs", "--nodes", "2"], "number of ranks is missing"),
        (["--to", "openmpi", "-np", "2", "--time", "2h"], "does not support --time"),
        (["--to", "pbs", "-np", "2", "--env", "NOT_THERE"], "NOT_THERE"),
        (["--to", "horovodrun", "-np", "2", "--elastic", "1:2"], "two or more hosts"),
        (["-np", "2", "train"], "is not an option of launch"),
        (["--elastic", "x"], "--elastic is not MIN:MAX"),
        (["--np", "2"], "-np N instead of --np"),
        (["--min-np", "1"], "--elastic MIN:MAX"),
        (["--host-discovery-script", "x"], "--discover SCRIPT"),
        (["--elastc", "1:2"], "did you mean --elastic?"),
        (["--restart=2"], "did you mean --restarts?"),  # which --re may be is another thing tomorrow
        *((of_training, "an option of training") for of_training in (["--task", "toy"], ["--train.steps=9"])),
        (["--quite-another"], "follow --"),
        *((["--to", "pbs", "-np", "2", *mount], "is not a mount") for mount in MOUNTS),
        (["--to", "pbs", "-np", "2", "--container=-x"], "not an image"),
        (["--to", "slurm", "-np", "2", "--container_mount", "/a:/a"], "--container_mount is given without an image"),
        (["--to", "slurm", "-np", "2", "--container_runtime", "pyxis"], "--container_runtime is given without"),
        (["-np", "0"], "-np"),
        (["-np", "2", "-H", "-oProxyCommand=x:2"], "-H"),
        (["-np", "2", "-H=-oProxyCommand=x:2"], "invalid host name"),
        (["-np", "2", "--discover", "/nothing/here"], "/nothing/here"),
        (["-np", "2", "--interface", "lo;x"], "--interface"),
        (["-np", "2", "--hang-timeout", "-1"], "--hang"),
        *(
            (["--to", "pbs", "-np", "2", *wrong], wrong[0])
            for wrong in (
                *(["--time", time] for time in ("90", "1:99:00", "0m")),
                *(["--name", name] for name in ("Not This", "3d")),
                ["--env", "A=secret"],
                ["--directive", "a\nb"],
                ["--queue", "a b"],
            )
        ),
    ],
)
def test_impossible_values_and_combinations_are_refused(asked: list[str], said: str, launch: Launch) -> None:
    out, err = launch(*asked, "--dry-run", code=2)
    assert said in err and "secret" not in err and not out
