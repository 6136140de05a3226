"""``hvdtrain launch`` by MPI and by schedulers: what --dry-run shows is what runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.install.mpirun import REMOTE_SHELL
from hvdtrain.runtime.mpi import horovod_library, mpi_library
from tests.support.gallery import Gallery
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S
from tests.support.warm import warm_python

SPY = """\
#!{python}
import json, os, sys
if sys.argv[1:] == ["--version"]:
    of_qsub = os.environ.get("VERSION", "pbs_version = 23")
    print("mpirun (Open MPI) 4.1.8" if sys.argv[0].endswith("mpirun") else of_qsub)
else:
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), text]))
"""
WORDS = ("--config", "run it's.yaml", "two\nlines", '$HOME "x"')


@pytest.fixture
def spied(tmp_path: Path) -> dict[str, str]:
    """An environment whose launchers tell what they get, that of Horovod's MPI among them."""
    library = mpi_library(horovod_library(), ENVIRONMENT)
    if library is None or library.family != "openmpi" or library.path is None:
        pytest.skip("Horovod speaks no Open MPI here")
    folder, beside = tmp_path / "an MPI" / "bin", tmp_path / "an MPI" / "lib"
    folder.mkdir(parents=True)
    beside.mkdir()
    (beside / library.soname).symlink_to(library.path)
    for name in ("mpirun", "qsub", "sbatch", "jsrun", "srun"):
        (folder / name).write_text(SPY.format(python=sys.executable))
        (folder / name).chmod(0o755)
    path = f"{folder}:{ENVIRONMENT['PATH']}"
    return {**ENVIRONMENT, "PATH": path, "LD_LIBRARY_PATH": str(beside), "PYTHONPATH": str(ROOT)}


def launch(folder: Path, variables: dict[str, str], *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    argv = [*warm_python(), "-m", "hvdtrain", "launch", *arguments]
    done = subprocess.run(
        argv,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == code, done.stderr
    return done


def received(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


def test_the_line_that_is_shown_is_the_one_that_runs(spied: dict[str, str], tmp_path: Path) -> None:
    """In a shell it gives a launcher the same words and variables as the command itself does."""
    asked = ("--to", "openmpi", "-H", "a:2,b:2", "--env", "SECRET")
    variables = {k: v for k, v in {**spied, "SECRET": "not to be told"}.items() if not k.startswith("OMPI_ALLOW")}
    shown = launch(tmp_path, variables, *asked, "--dry-run", "--", *WORDS).stdout
    by_hand = subprocess.run(["bash", "-c", shown], cwd=tmp_path, env=variables, capture_output=True, text=True)
    run = launch(tmp_path, variables, *asked, "--", *WORDS)
    assert "not to be told" not in shown + run.stderr and " -x SECRET " in shown
    hand, own = received(by_hand.stdout), received(run.stdout)
    assert hand[:2] == own[:2] and own[0][-len(WORDS) :] == list(WORDS)
    ours = {"HVDTRAIN_LAUNCH_OPTIONS", "_", "SHLVL", "PWD", "OLDPWD", "PS1"}
    assert {k: v for k, v in hand[2].items() if k not in ours} == {k: v for k, v in own[2].items() if k not in ours}
    assert f"+ {shown.strip()}" in run.stderr


def test_the_script_that_is_shown_is_the_one_that_is_handed_in(spied: dict[str, str], tmp_path: Path) -> None:
    asked = ("--to", "pbs", "--nodes", "2", "--gpus_per_node", "4", "--cpus_per_rank", "2", "--time", "1h30m")
    words = ("--run_dir", "two\nlines", "--data.text", '$HOME "x"')
    shown = launch(tmp_path, spied, *asked, "--dry-run", "--", *words).stdout
    argv, _, _, text = received(launch(tmp_path, spied, *asked, "--", *words).stdout)
    assert Path(argv[0]).name == "qsub" and argv[1:] == []
    assert text == shown and "#PBS -l walltime=01:30:00" in text and "mpirun -np 8" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--train.step", "3"), "did you mean --train.steps?"),
        (("--config", "not there.yaml"), "cannot read the config file 'not there.yaml'"),
        (("--seed", "x{array}"), "x2"),
    ],
)
def test_invalid_training_options_are_not_submitted(
    words: tuple[str, ...], said: str, spied: dict[str, str], tmp_path: Path
) -> None:
    """It would be found out after hours in a queue."""
    array = ("--array", "2-3") if "x{array}" in words else ()
    done = launch(tmp_path, spied, "--to", "pbs", "-np", "1", *array, "--", *words, code=2)
    assert said in done.stderr and "nothing was submitted" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("to", ["pbs", "slurm"])
def test_a_queued_job_gets_no_secrets(to: str, spied: dict[str, str], tmp_path: Path) -> None:
    """And nothing of the job of Slurm in which this process may run."""
    variables = {**spied, "HF_TOKEN": "not to be told", "HF_HOME": "h", "SLURM_MEM_PER_CPU": "9", "SLURM_JOB_ID": "7"}
    done = launch(tmp_path, variables, "--to", to, "-np", "1", "--")
    _, _, given, text = received(done.stdout)
    assert "not to be told" not in str(given) + text and "HF_TOKEN" not in text
    assert given["HF_HOME"] == "h" and "SLURM_MEM_PER_CPU" not in given
    assert "other users could read them: HF_TOKEN" in done.stderr
    done = launch(tmp_path, variables, "--to", to, "-np", "1", "--env", "HF_TOKEN", "--", code=2)
    assert "would show its value to other users" in done.stderr and done.stdout == ""


def test_another_qsub_is_refused(spied: dict[str, str], tmp_path: Path) -> None:
    done = launch(tmp_path, {**spied, "VERSION": "Version: 6.1.2"}, "--to", "pbs", "-np", "1", "--", code=2)
    assert "Torque and Grid Engine" in done.stderr and "found: Version: 6.1.2" in done.stderr and done.stdout == ""


def test_an_index_of_an_array_is_a_value(spied: dict[str, str], tmp_path: Path) -> None:
    done = launch(tmp_path, spied, "--to", "pbs", "-np", "1", "--array", "2-3", "--", "--seed", "{array}")
    assert Path(received(done.stdout)[0][0]).name == "qsub"


def test_a_script_activates_the_environment_of_this_shell(spied: dict[str, str], tmp_path: Path) -> None:
    """Modules, and of the variables those that there are."""
    variables = {k: v for k, v in spied.items() if k != "LD_LIBRARY_PATH"}
    variables |= {"LOADEDMODULES": "cuda/12:gcc", "MY_OWN": "1"}
    asked = ("--to", "pbs", "-np", "2", "--nodes", "2", "--env", "MY_OWN", "--dry-run")
    shown = launch(tmp_path, variables, *asked, "--").stdout
    assert "\nmodule load cuda/12 gcc || exit" in shown
    (names,) = (line.removeprefix("#PBS -v ") for line in shown.splitlines() if line.startswith("#PBS -v "))
    assert {"PATH", "MY_OWN"} <= set(names.split(",")) <= set(variables)


def test_hosts_of_an_allocation_are_those_of_the_job(spied: dict[str, str], tmp_path: Path) -> None:
    there = {**spied, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    there["SLURM_NTASKS"] = "10"
    shown = launch(tmp_path, there, "--to", "openmpi", "--dry-run", "--").stdout
    assert " -np 10 --host n08:4,n09:4,n10:2 " in shown
    shown = launch(tmp_path, there, "--dry-run", "--").stdout
    assert " srun --mpi=none --ntasks=10 --nodes=3 --cpu-bind=none" in shown
    shown = launch(tmp_path, {**there, "SLURM_TASKS_PER_NODE": "4(x3)"}, "--dry-run", "--").stdout
    assert " srun --mpi=none --ntasks=12 --nodes=3 --ntasks-per-node=4 " in shown
    shown = launch(tmp_path, {**there, "SLURM_STEP_ID": "0"}, "--dry-run", "--").stdout
    assert " --overlap " in shown
    shown = launch(tmp_path, there, "--to", "openmpi", "-H", "a:1", "--dry-run", "--").stdout
    assert " -np 1 --host a:1 " in shown


def test_without_ssh_open_mpi_does_not_look_for_it(spied: dict[str, str], tmp_path: Path) -> None:
    """Its ranks on this host need none; a job on others is left to say what it lacks."""
    bare = {name: value for name, value in spied.items() if name not in REMOTE_SHELL}
    bare["PATH"] = spied["PATH"].partition(":")[0]
    asked = ("--to", "openmpi", "--dry-run")
    assert "OMPI_MCA_plm_rsh_agent=/bin/false " in launch(tmp_path, bare, *asked, "-np", "2", "--").stdout
    assert "OMPI_MCA_plm_rsh_agent=/bin/false " in launch(tmp_path, bare, *asked, "-H", "localhost:2", "--").stdout
    assert "plm" not in launch(tmp_path, bare, *asked, "-H", "localhost:1,b:1", "--").stdout
    own = {**bare, "OMPI_MCA_plm_rsh_agent": "docker exec"}
    assert "plm" not in launch(tmp_path, own, *asked, "-np", "2", "--").stdout
    (tmp_path / "ssh").touch(0o755)
    there = {**bare, "PATH": f"{bare['PATH']}:{tmp_path}"}
    assert "plm" not in launch(tmp_path, there, *asked, "-np", "2", "--").stdout


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_a_file_of_an_allocation_names_the_hosts(name: str, spied: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\n")
    there = {**spied, name: str(tmp_path / "hosts")}
    assert " -np 3 --host a:2,b:1 " in launch(tmp_path, there, "--dry-run", "--").stdout


def test_a_pod_has_variables_of_its_own(spied: dict[str, str], tmp_path: Path) -> None:
    asked = ("--to", "mpijob", "-np", "2", "--nodes", "2", "--env", "NOT_HERE", "--dry-run", "--")
    command = yaml.safe_load(launch(tmp_path, spied, *asked).stdout)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    words = command["spec"]["containers"][0]["command"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "-x"] == ["NOT_HERE"]


def test_lsf_with_jsrun(spied: dict[str, str], tmp_path: Path) -> None:
    shown = launch(tmp_path, spied, "--to", "lsf", "-np", "4", "--nodes", "2", "--dry-run", "--").stdout
    assert "#BSUB -nnodes 2" in shown and "jsrun --nrs 4 --rs_per_host 2 " in shown


def test_ranks_train_with_the_installed_launcher(gallery: Gallery) -> None:
    """Without --to, by the MPI that Horovod uses; the command to resume is launch again."""
    job = gallery["resumed"]
    out, err = job.notes["out"], job.notes["err"]
    assert "hvdtrain launch: --to openmpi (Open MPI" in err and "Horovod uses Open MPI" in err
    assert "on 2 rank(s)" in out
    assert re.search(r"^binding: ranks? 0.* on cores \d", out, re.M)
    started, _ = job.events("started")
    assert [group["kept"] for group in started["binding"]] == [""] * len(started["binding"]) != []
    go_on = next(line for line in out.splitlines() if line.strip().startswith("continue"))
    assert shlex.split(go_on)[2:5] == ["launch", "-np", "2"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--to", "pbs", "-np", "5", "--nodes", "2"], "cannot be divided evenly"),
        (["--to", "pbs", "--nodes", "2"], "the number of ranks is missing"),
        (["--to", "openmpi", "-np", "2", "--time", "2h"], "does not support --time"),
        (["--to", "pbs", "-np", "2", "--env", "NOT_THERE"], "the variable is not set in this environment"),
        (["--to", "pbs", "-np", "2", "--time", "1m"], "--notice is not shorter than the job"),
        (["--to", "lsf", "-np", "2", "--array", "1-2"], "all jobs of the array would be the same run"),
        (["--to", "horovodrun", "-np", "2", "--elastic", "1:2"], "on two or more hosts"),
        (["-np", "2", "train"], "is not an option of launch"),
        (["--elastic", "x"], "--elastic is not MIN:MAX"),
        (["--np", "2"], "use -np N instead of --np"),
    ],
)
def test_impossible_combinations_are_refused(
    asked: list[str], said: str, spied: dict[str, str], tmp_path: Path
) -> None:
    assert said in launch(tmp_path, spied, *asked, "--dry-run", code=2).stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--time", "90"], "'90' is not a time; expected 2h"),
        (["--time", "1:99:00"], "is not a time"),
        (["--time", "0m"], "above 0"),
        (["--array", "3-"], "expected 0-3, 0,2,5"),
        (["--name", "Not This"], "of a-z, 0-9"),
        (["--name", "3d"], "starting with a letter"),
        (["--env", "A=secret"], "without a value"),
        (["--directive", "a\nb"], "the rest of a line"),
        (["--queue", "a b"], "no spaces"),
    ],
)
def test_an_invalid_value_is_refused(wrong: list[str], said: str, spied: dict[str, str], tmp_path: Path) -> None:
    done = launch(tmp_path, spied, "--to", "pbs", "-np", "2", *wrong, "--dry-run", code=2)
    assert said in done.stderr and "secret" not in done.stderr


def test_a_scheduler_that_is_not_here_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, {**ENVIRONMENT, "PATH": "/usr/bin:/bin"}, "--to", "lsf", "-np", "2", "--", code=2)
    assert "there is no bsub on this machine" in done.stderr and "--dry-run" in done.stderr
