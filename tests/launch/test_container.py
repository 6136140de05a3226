"""Ranks in containers: what starts them and what is refused. Real launchers: test_real_mpis.py and tests/slurm."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli.launch_options import parse
from hvdtrain.cli.launch_spec import idle_gpus, spec_of
from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import AUTO, OWN, Choice, choose, refuse_options, refuse_shape
from hvdtrain.launch.detect import Machine, find_container_runtime
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.targets import TARGETS
from tests.support import jobs
from tests.support.containers import make_runtime

TAKE = {"openmpi", "mpich", "intelmpi", "srun", "slurm", "pbs", "lsf"}


def spec(*options: str, target: str = "openmpi", environ: dict[str, str] | None = None) -> JobSpec:
    words = parse(["-np", "2", *options, "--"])
    return spec_of(words, Choice(target, jobs.OPEN_MPI_4, ""), Machine(), environ or {})


@pytest.mark.parametrize("target", [OWN, *TARGETS])
def test_targets_start_containers_or_refuse_them(target: str) -> None:
    for option in ("container", "container_mount", "container_runtime"):
        if target in TAKE:
            refuse_options(target, [option])
        else:
            with pytest.raises(LaunchError, match=f"--to {target} does not support --{option.replace('_', '-')}"):
                refuse_options(target, [option])


@pytest.mark.parametrize(
    ("asked", "image", "target", "here", "found"),
    [
        ("auto", "lab/x:1", "srun", ("pyxis", "apptainer"), "pyxis"),
        ("auto", "lab/x:1", "slurm", ("pyxis",), "pyxis"),
        ("auto", "x.sif", "slurm", ("pyxis", "apptainer"), "apptainer"),
        ("auto", "lab/x:1", "slurm", ("srun", "singularity"), "singularity"),
        ("auto", "lab/x:1", "openmpi", ("pyxis", "apptainer", "singularity"), "apptainer"),
        ("apptainer", "x.sif", "pbs", ("singularity",), "singularity"),
        ("apptainer", "x.sif", "pbs", (), "apptainer"),
        ("pyxis", "lab/x:1", "slurm", (), "pyxis"),
    ],
)
def test_what_starts_containers_is_found(
    asked: str, image: str, target: str, here: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    for name in here:
        make_runtime(tmp_path, *(("srun", "/bin/false") if name == "pyxis" else (name,)))
    environ = {"PATH": str(tmp_path / "runtime")}
    assert find_container_runtime(asked, image, target, environ, by_srun=TARGETS[target].by_srun) == found


@pytest.mark.parametrize(
    ("asked", "image", "target", "said"),
    [
        ("auto", "lab/x:1", "srun", "--container-image in srun --help"),
        ("auto", "lab/x:1", "pbs", "--container_runtime apptainer"),
        ("pyxis", "lab/x:1", "pbs", "--to pbs and lab/x:1"),
        ("pyxis", "x.sif", "slurm", "an image of a registry"),
    ],
)
def test_what_starts_no_container_is_refused(asked: str, image: str, target: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=said):
        find_container_runtime(asked, image, target, {"PATH": str(tmp_path)}, by_srun=TARGETS[target].by_srun)


@pytest.mark.parametrize(
    ("target", "job", "found"),
    [
        ("openmpi", jobs.one(jobs.OPEN_MPI_4, container=jobs.SIF, folder="/a:b"), "/a:b"),
        ("openmpi", jobs.one(jobs.OPEN_MPI_4, container=replace(jobs.SIF, mounts=("/a,b:/c",))), "/a,b:/c"),
        ("srun", jobs.one(container=jobs.BY_PYXIS), "/home/me/my work"),
        ("srun", jobs.one(container=replace(jobs.BY_PYXIS, mounts=("/$HOME:/h",)), folder="/f"), r"/\$HOME:/h"),
    ],
)
def test_a_path_that_a_mount_would_change_is_refused(target: str, job: JobSpec, found: str) -> None:
    with pytest.raises(LaunchError, match=f"cannot mount this path(?s:.*){found}"):
        TARGETS[target].render(job)


def test_the_image_decides_what_the_program_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = spec("--container", "./x.sif", "--container_runtime", "apptainer", "--env", "A", environ={"A": "1"})
    assert made.container is not None and made.container.image == f"{tmp_path}/x.sif"
    assert made.container.override == ("A",) and made.program[0] == "python" and made.python == sys.executable
    words = parse(["-np", "2", "--container", "x", "--container_runtime", "apptainer", "--", "./not-here", "1"])
    assert spec_of(words, Choice("openmpi", None, ""), Machine(), {}).program == ("./not-here", "1")


def test_gpus_of_the_allocation_reach_the_container() -> None:
    image = ("--container", "x", "--container_runtime", "apptainer")
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "2"}
    for target, environ, gpus in (("srun", inside, True), ("openmpi", inside, True), ("slurm", inside, False)):
        made = spec(*image, target=target, environ=environ)
        assert made.container is not None and made.container.gpus == gpus
    made = spec(*image, "--gpus_per_node", "2", target="slurm")
    assert made.container is not None and made.container.gpus


NO_HOROVOD = Machine(mpis=(jobs.MPICH, jobs.OPEN_MPI_4), family=None, horovod=False)


@pytest.mark.parametrize("to", [AUTO, "pbs", "lsf"])
def test_without_horovod_here_the_image_has_to_fit_the_mpi_of_this_machine(to: str) -> None:
    choice = choose(to, ["np", "container"], NO_HOROVOD)
    assert choice.target == ("mpich" if to == AUTO else to) and choice.mpi == jobs.MPICH
    assert "that of the image must be built for MPICH" in choice.why
    assert choose(to, ["np"], NO_HOROVOD).mpi is None


def test_a_requested_pmi_is_not_lost_without_horovod() -> None:
    pmi = replace(NO_HOROVOD, pmi="pmix_v4")
    assert choose("slurm", ["container"], pmi).mpi == jobs.MPICH
    for machine in (NO_HOROVOD, replace(pmi, mpis=(), pmi="none"), replace(pmi, mpis=())):
        with pytest.raises(LaunchError, match="srun cannot connect the ranks"):
            choose("slurm", ["container"], machine)
    with pytest.raises(LaunchError, match="srun cannot connect the ranks"):
        choose("slurm", [], replace(pmi, mpis=()))


def test_the_mpi_of_a_horovod_outside_the_image_does_not_count() -> None:
    here = Machine(mpis=(jobs.OPEN_MPI_4, jobs.MPICH), family="openmpi")
    assert choose("mpich", ["container"], here).mpi == jobs.MPICH
    with pytest.raises(LaunchError, match="Horovod uses another MPI"):
        choose("mpich", [], here)


def test_a_queued_job_without_mpi_is_refused() -> None:
    for target in ("pbs", "lsf"):
        with pytest.raises(LaunchError, match="needs an mpirun"):
            refuse_shape(JobSpec((), 2, container=jobs.SIF), target)
    refuse_shape(JobSpec((), 2, container=jobs.SIF), "srun")


@pytest.mark.parametrize(
    ("target", "environ", "options", "said"),
    [
        ("srun", {"SLURM_GPUS_ON_NODE": "8"}, (), "leave 4 of 8 GPUs idle: each rank uses one; for all: -np 8"),
        ("openmpi", {"SLURM_GPUS_ON_NODE": "8"}, (), "idle"),
        ("srun", {"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_JOB_NODELIST": "a,b"}, (), "leave 4 of 8"),
        (OWN, {"SLURM_GPUS_ON_NODE": "8"}, ("--elastic", "2:6"), "6 ranks leave 2 of 8"),
        (OWN, {"SLURM_GPUS_ON_NODE": "8"}, ("--elastic", "2:8"), ""),
        ("srun", {"SLURM_GPUS_ON_NODE": "8"}, ("--gpus_per_node", "4"), ""),
        ("srun", {"SLURM_GPUS_ON_NODE": "4"}, (), ""),
        ("slurm", {"SLURM_GPUS_ON_NODE": "8"}, (), ""),
        ("mpijob", {}, ("--gpus_per_node", "8"), "leave 4 of 8 GPUs idle, unless the program uses several"),
    ],
)
def test_idle_gpus_are_reported(target: str, environ: dict[str, str], options: tuple[str, ...], said: str) -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", **environ} if environ else {}
    words = ["sh"] if target == "mpijob" else []
    made = spec_of(parse(["-np", "4", *options, "--", *words]), Choice(target, None, ""), Machine(), inside)
    note = idle_gpus(made, target, inside)
    assert said in note and bool(said) == bool(note)
