from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import AUTO, OWN, choose, needs_machine, refuse_options, refuse_shape
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import Batch, JobSpec, Mpi
from hvdtrain.launch.targets import TARGETS
from tests.support.jobs import INTEL, MPICH, OPEN_MPI_4, OPEN_MPI_5

ON_OPEN_MPI = Machine(mpis=(OPEN_MPI_4, MPICH), family="openmpi")
ON_MPICH = Machine(mpis=(INTEL, MPICH), family="mpich")
IN_SLURM = replace(ON_OPEN_MPI, in_slurm=True, srun=True, slurm_mpi=("none",))
GLOO_ONLY = Machine(mpis=(OPEN_MPI_4,), family=None)


@pytest.mark.parametrize(
    ("here", "given", "target", "mpi", "why"),
    [
        (ON_OPEN_MPI, ["np"], "openmpi", OPEN_MPI_4, "Horovod uses Open MPI 4.1.8"),
        (replace(ON_OPEN_MPI, mpis=(MPICH, OPEN_MPI_5)), ["np"], "openmpi", OPEN_MPI_5, "uses Open MPI 5.0.11"),
        (ON_MPICH, ["np"], "intelmpi", INTEL, "Horovod uses Intel MPI"),
        (GLOO_ONLY, ["np"], OWN, None, "Horovod has no MPI"),
        (replace(ON_OPEN_MPI, mpis=(MPICH,)), ["np"], OWN, None, "found: MPICH 5.0.2"),
        (IN_SLURM, [], OWN, None, "srun has no PMI of Open MPI 4.1.8 (srun --mpi=list: none): over Gloo"),
        (replace(IN_SLURM, slurm_mpi=("pmix_v4",)), [], "srun", OPEN_MPI_4, "inside an allocation of Slurm"),
        (replace(ON_OPEN_MPI, in_slurm=True), ["np"], "openmpi", OPEN_MPI_4, "Horovod uses"),
        (ON_OPEN_MPI, ["np", "elastic"], OWN, None, "--elastic"),
        (ON_OPEN_MPI, ["np", "tag"], OWN, None, "--tag"),
    ],
)
def test_the_fitting_target_is_chosen(here: Machine, given: list[str], target: str, mpi: object, why: str) -> None:
    choice = choose(AUTO, given, here)
    assert (choice.target, choice.mpi) == (target, mpi)
    assert why in choice.why


@pytest.mark.parametrize(
    ("to", "here", "said"),
    [
        ("mpich", ON_OPEN_MPI, ["Horovod uses another MPI than MPICH 5.0.2", "one built for Open MPI"]),
        ("openmpi", ON_MPICH, ["needs mpirun of Open MPI", "Intel MPI 2021.17 (/opt/intel/bin/mpirun)"]),
        ("openmpi", GLOO_ONLY, ["one built for no MPI"]),
        ("intelmpi", ON_OPEN_MPI, ["needs mpirun of Intel MPI"]),
    ],
)
def test_an_mpi_of_another_build_is_refused(to: str, here: Machine, said: list[str]) -> None:
    with pytest.raises(LaunchError) as wrong:
        choose(to, [], here)
    assert all(part in str(wrong.value) for part in said) and wrong.value.next_step


def test_horovodrun_goes_over_gloo_where_it_cannot_drive_the_mpi() -> None:
    assert choose("horovodrun", [], ON_OPEN_MPI).mpi == OPEN_MPI_4
    for here in (replace(ON_OPEN_MPI, mpis=(OPEN_MPI_5,)), ON_MPICH, GLOO_ONLY):
        assert choose("horovodrun", [], here).mpi is None


@pytest.mark.parametrize(
    ("mpi", "kinds", "pmi", "kind"),
    [
        (OPEN_MPI_4, ("none", "pmi2", "pmix"), "", "pmix"),
        (OPEN_MPI_4, ("pmi2", "pmix_v3", "pmix_v4"), "", "pmix_v3"),
        (OPEN_MPI_4, ("pmi2",), "", ""),
        (MPICH, ("pmi2", "pmix"), "", "pmi2"),
        (INTEL, ("pmi2", "pmix"), "", ""),
        (None, ("pmi2", "pmix"), "", ""),
        (OPEN_MPI_4, ("pmix",), "pmix_v4", "pmix_v4"),
        (INTEL, ("pmix",), "pmi2", "pmi2"),
        (OPEN_MPI_4, ("pmix",), "none", ""),
        (None, ("pmix",), "pmix", ""),
    ],
)
def test_how_srun_connects_an_mpi(mpi: Mpi | None, kinds: tuple[str, ...], pmi: str, kind: str) -> None:
    """By the PMI that fits, or the requested one."""
    assert Machine(slurm_mpi=kinds, pmi=pmi).slurm_mpi_for(mpi) == kind


def test_cray_mpich_needs_no_mpirun_and_uses_its_own_pmi() -> None:
    mpi = Mpi("mpich", "8.1.28", "srun")
    cray = Machine((), "mpich", srun=True, in_slurm=True, srun_mpi=mpi, cray=True)
    here = replace(cray, slurm_mpi=("cray_shasta", "none", "pmi2"))
    assert (here.slurm_mpi_for(mpi), replace(here, cray=False).slurm_mpi_for(mpi)) == ("cray_shasta", "pmi2")
    assert replace(here, slurm_mpi=("pmi2",)).slurm_mpi_for(mpi) == "pmi2"
    for choice in (choose(AUTO, [], here), choose("slurm", [], here)):
        assert choice.mpi == mpi and "Gloo" not in choice.why


def test_intel_mpi_uses_slurms_pmi_where_it_is_named() -> None:
    here = replace(ON_MPICH, in_slurm=True, srun=True, slurm_mpi=("pmi2",))
    assert "I_MPI_PMI_LIBRARY" in choose(AUTO, [], here).why
    named = replace(here, intel_pmi=True)
    assert (named.slurm_mpi_for(INTEL), "Gloo" in choose(AUTO, [], named).why) == ("pmi2", False)


@pytest.mark.parametrize(("kind", "pmi", "gloo"), [("none", "", True), ("pmix", "", False), ("pmix", "none", True)])
def test_without_pmi_a_script_starts_our_driver_and_srun_refuses(kind: str, pmi: str, gloo: bool) -> None:
    here = replace(IN_SLURM, slurm_mpi=(kind,), pmi=pmi)
    assert ("our own driver, over Gloo" in choose("slurm", [], here).why) == gloo
    assert (choose("slurm", [], here).mpi is None) == gloo
    for to, given in (("srun", []), ("slurm", ["container"]), (AUTO, ["container"])):
        with pytest.raises(LaunchError, match="cannot connect") if gloo else nullcontext():
            assert choose(to, given, here).mpi == OPEN_MPI_4


def test_our_own_driver_waits_for_no_program_of_mpi() -> None:
    assert not needs_machine(OWN, ["np"]) and not needs_machine(AUTO, ["np", "elastic"])
    assert needs_machine(AUTO, ["np"]) and needs_machine("horovodrun", ["np", "elastic"])


def test_schedulers_are_asked_for_where_horovod_is_not() -> None:
    """A script may be written anywhere."""
    for target in ("pbs", "lsf", "mpijob"):
        assert choose(target, [], Machine(horovod=False)).target == target


@pytest.mark.parametrize("target", [OWN, *TARGETS])
def test_an_option_that_means_nothing_is_refused(target: str) -> None:
    taken = {"time", "events"} & (TARGETS[target].takes if target != OWN else {"events"})
    for option in {"time", "events"} - taken:
        with pytest.raises(LaunchError, match=f"--to {target} does not support --{option}") as wrong:
            refuse_options(target, ["np", option])
        able = str(wrong.value.next_step)
        assert ("--to slurm" in able or "--to pbs" in able) if option == "time" else able.endswith("--to hvdtrain")


@pytest.mark.parametrize("target", ["openmpi", "mpich", "intelmpi"])
def test_elastic_without_gloo_is_refused_with_the_reason(target: str) -> None:
    with pytest.raises(LaunchError, match="cannot be elastic: a dead rank ends an MPI job"):
        refuse_options(target, ["np", "elastic"])


@pytest.mark.parametrize(
    ("target", "job", "said"),
    [
        *((to, JobSpec((), 5, nodes=2, hosts={"a": 2, "b": 2}), "number of slots of -H") for to in ("openmpi", OWN)),
        ("pbs", JobSpec((), 5, nodes=2), "cannot be divided evenly"),
        *((to, JobSpec((), 6, nodes=2, hosts={"a": 4, "b": 2}), "the same number") for to in ("pbs", "intelmpi")),
        ("pbs", JobSpec((), 12, nodes=2, gpus_per_node=8), "each rank uses one GPU"),
        ("slurm", JobSpec(("python",), 12, nodes=2, gpus_per_node=8, is_program=True), "each rank uses one GPU"),
        ("pbs", JobSpec((), 8, gpus_per_node=8), "one core(?s:.*)--cpus-per-rank 8"),
        ("slurm", JobSpec((), 4, batch=Batch(time_s=60, notice_s=60)), "--notice is not shorter"),
        ("pbs", JobSpec((), 4, batch=Batch(time_s=60, notice_s=61)), "--notice is not shorter"),
        *((OWN, JobSpec((), 4, elastic=bad), "--elastic is not MIN:MAX") for bad in ((5, 8), (0, 8), (1, 3))),
    ],
)
def test_numbers_that_do_not_fit_are_refused(target: str, job: JobSpec, said: str) -> None:
    with pytest.raises(LaunchError, match=said) as wrong:
        refuse_shape(job, target)
    assert wrong.value.expected


@pytest.mark.parametrize(
    ("target", "job"),
    [
        ("openmpi", JobSpec((), 6, nodes=2, hosts={"a": 4, "b": 2})),
        ("openmpi", JobSpec((), 3, nodes=2, hosts={"a": 2, "b": 2})),
        ("slurm", JobSpec((), 4, batch=Batch(time_s=61, notice_s=60))),
        ("slurm", JobSpec((), 16, nodes=2, gpus_per_node=8)),
        ("pbs", JobSpec((), 16, nodes=2, gpus_per_node=8, cpus_per_rank=2)),
        ("slurm", JobSpec(("python", "a.py"), 8, nodes=2, gpus_per_node=8, is_program=True)),
        (OWN, JobSpec((), 4, elastic=(1, 8))),
        (OWN, JobSpec((), 4, hosts={"a": 1}, discover="x")),
    ],
)
def test_numbers_that_fit_are_not(target: str, job: JobSpec) -> None:
    refuse_shape(job, target)
