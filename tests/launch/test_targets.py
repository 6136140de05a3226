"""Each target's start compared with its golden file, and laws of all targets."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import Command
from hvdtrain.launch.targets import TARGETS
from tests.launch.test_real_mpis import AWKWARD
from tests.support import jobs
from tests.support.host import required_tool
from tests.support.jobs import JOBS
from tests.support.mpijob_schema import problems

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize("name", JOBS)
def test_the_whole_start(name: str) -> None:
    target, job = JOBS[name]
    assert f"{TARGETS[target].render(job)}\n" == (GOLDEN / f"{name}.txt").read_text()


def test_every_target_and_golden_file_is_tried() -> None:
    assert {target for target, _ in JOBS.values()} == set(TARGETS)
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


@pytest.mark.parametrize("name", [name for name, (_, job) in JOBS.items() if job.pass_on])
def test_variables_are_handed_on_by_name_alone(name: str) -> None:
    """horovodrun hands on what it likes, by value; Slurm all, without naming it."""
    target, job = JOBS[name]
    told = str(TARGETS[target].render(job))
    assert "SECRET=" not in told
    assert ("SECRET" in told) == (target not in ("horovodrun", "slurm", "srun"))


@pytest.mark.parametrize("name", [name for name, (target, _) in JOBS.items() if target in ("pbs", "lsf", "slurm")])
def test_scripts_are_clean(name: str, tmp_path: Path) -> None:
    target, job = JOBS[name]
    (tmp_path / "script").write_text(str(TARGETS[target].render(job)) + "\n")
    done = subprocess.run(
        [required_tool("shellcheck"), "-s", "bash", "script"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


SPY = "#!/bin/sh\nexec {python} -c 'import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd()]))' \"$@\"\n"


@pytest.mark.parametrize("target", ["pbs", "lsf"])
@pytest.mark.parametrize("mpi", [jobs.OPEN_MPI_4, jobs.MPICH, jobs.INTEL, None])
def test_a_script_starts_the_given_command(target: str, mpi: jobs.Mpi | None, tmp_path: Path) -> None:
    """By a real shell, with a spy in the place of the launcher; names and paths as awkward as they come."""
    folder = tmp_path / 'it\'s\na "folder"'
    folder.mkdir()
    python = folder / "python"
    programs = {"openmpi": "mpirun", "mpich": "mpirun", "intelmpi": "mpiexec.hydra"}
    spy = folder / programs[mpi.flavour] if mpi else python
    spy.write_text(SPY.format(python=shlex.quote(str(shutil.which("python3")))))
    spy.chmod(0o755)
    job = jobs.queued(
        replace(mpi, mpirun=str(folder / "mpirun")) if mpi else None,
        jobs.Batch(time_s=600),
        arguments=AWKWARD,
        python=str(python),
        folder=str(folder),
    )
    script = tmp_path / "script"
    script.write_text(str(TARGETS[target].render(job)))
    (tmp_path / "nodes").write_text("a\n" * 8 + "b\n" * 8)
    given = dict.fromkeys(("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"), str(tmp_path / "nodes"))
    done = subprocess.run(["bash", script], env={"PATH": "/usr/bin:/bin", **given}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    argv, where = json.loads(done.stdout)
    assert where == str(folder)
    assert argv[-len(AWKWARD) :] == list(AWKWARD)
    if mpi is None:
        assert argv[argv.index("-H") + 1] in ("a:8,b:8", "b:8,a:8")
    else:
        assert str(tmp_path / "nodes") in argv and str(python) in argv


@pytest.mark.parametrize("name", [name for name, (target, _) in JOBS.items() if target == "mpijob"])
@pytest.mark.some(1)
def test_the_operator_takes_a_manifest_and_hands_on_its_words(name: str) -> None:
    _, job = JOBS[name]
    manifest = yaml.safe_load(str(TARGETS["mpijob"].render(replace(job, arguments=(*AWKWARD, "$(HOME)")))))
    assert problems(manifest) == []
    launcher = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    words = launcher["command"][-len(AWKWARD) - 1 :]
    assert all("$" not in word.replace("$$", "") for word in words)  # Kubernetes takes each $$ for $
    assert [word.replace("$$", "$") for word in words] == [*AWKWARD, "$(HOME)"]


@pytest.mark.parametrize("target", ["openmpi", "mpich", "intelmpi", "horovodrun"])
def test_one_other_host_is_reached_as_several_are(target: str) -> None:
    """It needs what several need: variables, the network, ssh's options, where the MPI is."""
    mpi = {"mpich": jobs.MPICH, "intelmpi": jobs.INTEL}.get(target, jobs.OPEN_MPI_4)
    several = jobs.two(mpi, ssh_options=())
    there = replace(several, ranks=4, nodes=1, hosts={"b": 4}, host="a")
    here = replace(there, hosts={"a": 4})
    words = {name: str(TARGETS[target].render(job)) for name, job in (("2", several), ("there", there), ("here", here))}
    assert words["there"] == words["2"].replace("-np 8", "-np 4").replace("a:4,b:4", "b:4").replace("a,b", "b")
    assert words["here"] != words["there"].replace("b", "a") and ("SECRET" in words["here"]) is False


@pytest.mark.parametrize("mpi", [jobs.OPEN_MPI_4, jobs.MPICH, jobs.INTEL])
def test_an_argument_that_mpirun_would_split_is_refused(mpi: jobs.Mpi) -> None:
    with pytest.raises(LaunchError, match="argument with a space"):
        TARGETS[mpi.flavour].render(jobs.two(mpi, ssh_options=("-o", "ProxyCommand=nc a b")))


def test_where_mpi_is_goes_through_the_shell_of_horovodrun() -> None:
    job = jobs.two(replace(jobs.OPEN_MPI_4, prefix="/my env; rm"), ssh_options=())
    start = TARGETS["horovodrun"].render(job)
    assert isinstance(start, Command) and "--mpi-args=--prefix '/my env; rm'" in start.argv


@pytest.mark.parametrize(
    ("arguments", "is_program", "added"),
    [
        (("--config", "a.yaml"), False, True),
        (("--parallel.device=cpu",), False, False),
        (("evaluate", "run"), False, False),
        (("python", "a.py"), True, False),
    ],
)
def test_training_on_gpus_does_not_fall_back(arguments: tuple[str, ...], is_program: bool, added: bool) -> None:
    """The option comes last, since a file of all options has the default."""
    job = jobs.queued(jobs.OPEN_MPI_4, arguments=arguments, is_program=is_program)
    assert (job.program[-2:] == ("--parallel.device", "cuda")) == added
    assert replace(job, gpus_per_node=0).program[-2:] != ("--parallel.device", "cuda")


def test_the_only_worker_of_an_mpijob_is_another_host_than_the_launcher() -> None:
    text = str(TARGETS["mpijob"].render(jobs.one(pass_on=("HF_HOME",), arguments=("--run_dir", "a$$b $(X) 😀"))))
    assert '- "-x"\n                - "HF_HOME"\n' in text and '"a$$$$b $$(X) 😀"' in text


@pytest.mark.parametrize("target", ["pbs", "lsf"])
def test_only_training_gets_the_notice(target: str) -> None:
    notice = jobs.Batch(time_s=7200)
    assert "timeout" in str(TARGETS[target].render(jobs.queued(jobs.OPEN_MPI_4, notice)))
    for more in ({"arguments": ("evaluate", "run")}, {"arguments": ("true",), "is_program": True}):
        assert "timeout" not in str(TARGETS[target].render(jobs.queued(jobs.OPEN_MPI_4, notice, **more)))  # type: ignore[arg-type]
