"""Checks of the launcher: whether its ranks find each other, and what it exposes."""

from __future__ import annotations

from hvdtrain.config.windows import AUTO
from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.launch.variables import secret_variables
from hvdtrain.plan.plan import ENGINES, Plan
from hvdtrain.runtime.environment import GLOO_LAUNCHER, LAUNCHERS, NO_LAUNCHER, TORCHRUN, elastic, rank_label
from hvdtrain.runtime.gloo import describe_exposure
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.timeline import ASK, decide

_PMI = {"openmpi": ("PMIX_RANK", "pmix"), "mpich": ("PMI_RANK", "pmi2")}
"""By MPI family: the variable in which srun passes the rank, and the value of srun --mpi that sets it."""

_OURS = "hvdtrain launch, mpirun, horovodrun or srun"


def launcher(facts: DoctorFacts) -> Finding:
    """Report the launcher and check that Horovod uses its MPI."""
    found, refusal = f"{facts.info.launcher}, {rank_label(facts.info)}", facts.mpi.refusal
    if refusal is not None:
        why = f"{refusal.what} Expected: {refusal.expected}"
        return Finding("launcher", "broken", found, why, refusal.next_step or "")
    notes = {
        NO_LAUNCHER: f"a single process; start several ranks with {_OURS}",
        TORCHRUN: f"for {_without_horovod()}; other engines need ranks started by {_OURS}",
    }
    return Finding("launcher", "ok", found, notes.get(facts.info.launcher, ""))


def _without_horovod() -> str:
    return " or ".join(f"--parallel.engine {name}" for name in ENGINES if not Plan(engine=name).by_horovod)


def stale_launcher(facts: DoctorFacts) -> Finding | None:
    """Check that no variables of another launcher are left over from a shell or a job script."""
    if facts.info.launcher != GLOO_LAUNCHER or elastic(facts.environ):
        return None
    values = {line: (facts.environ.get(line.rank), facts.environ.get(line.size)) for line in LAUNCHERS}
    ours, others = facts.info.started_by, [line for line in LAUNCHERS if line.mpi in ("openmpi", "mpich")]
    theirs = next((line for line in others if None not in values[line] and values[line] != values[ours]), None)
    if theirs is None:
        return None
    found = " and ".join(f"{line.rank}={values[line][0]} of {values[line][1]}" for line in (ours, theirs))
    why = "the variables of two launchers disagree on the rank: two processes may act as the same rank"
    fix = f"unset {' '.join(ours.signs)}   (or start from a shell outside of any job)"
    return Finding("launcher_variables", "broken", found, why, fix)


def controller(facts: DoctorFacts) -> Finding | None:
    """Check that HOROVOD_CONTROLLER fits the launcher."""
    requested = facts.environ.get("HOROVOD_CONTROLLER", "").lower()
    by = "gloo" if facts.info.launcher == GLOO_LAUNCHER else "mpi"
    if facts.info.launcher in (NO_LAUNCHER, TORCHRUN) or requested in ("", by):
        return None
    why = f"the launcher started the ranks for {by}: Horovod aborts, or each rank runs alone"
    return Finding("controller", "broken", f"HOROVOD_CONTROLLER={requested}", why, "unset HOROVOD_CONTROLLER")


def slurm_step(facts: DoctorFacts) -> Finding | None:
    """Check that srun uses the PMI that the MPI understands. Without any PMI, `launcher` reports it."""
    library = facts.mpi.library
    if facts.mpi.refusal or facts.info.launcher != "slurm" or facts.info.size == 1 or library is None:
        return None
    variable, pmi = _PMI.get(library.family, ("", ""))
    if not variable or variable in facts.environ:
        return None
    found = f"{facts.info.size} ranks without {variable}"
    why = f"srun uses a PMI that {library} does not understand: it aborts, or each rank runs alone"
    fix = f"srun --mpi={pmi} if srun --mpi=list shows it; else hvdtrain launch --to srun, which needs no PMI"
    return Finding("srun", "warning", found, why, fix)


def rendezvous(facts: DoctorFacts) -> Finding | None:
    """Warn of the open rendezvous server of ``horovodrun --gloo``."""
    if not (why := describe_exposure(facts.environ)):
        return None
    fix = "use hvdtrain launch or mpirun instead of horovodrun --gloo"
    return Finding("rendezvous", "warning", "open to the network", why, fix)


def secrets(facts: DoctorFacts) -> Finding | None:
    """Name secret variables that ``horovodrun --gloo`` writes on command lines, where all users can read them."""
    names = secret_variables(facts.environ)
    if facts.info.launcher != GLOO_LAUNCHER or not names or not describe_exposure(facts.environ):
        return None
    why = (
        "horovodrun --gloo writes each variable and its value on a command line, which every user of the host can"
        " read (ps); it also connects without checking host keys"
    )
    fix = "use hvdtrain launch or mpirun instead of horovodrun --gloo; then replace these secrets"
    return Finding("secrets", "warning", ", ".join(names), why, fix)


def half_over_gloo(facts: DoctorFacts) -> Finding | None:
    """Warn of fp16 compression if Gloo would sum halves on the CPU."""
    if facts.info.launcher != GLOO_LAUNCHER or facts.installation.torch.values.get("gpus"):
        return None
    why = "fp16 compression is 27 times as slow as over MPI; keep --parallel.compression none"
    return Finding("gloo", "warning", "ranks communicate over Gloo on the CPU", why, "horovodrun --mpi, or mpirun")


def timeline(facts: DoctorFacts) -> Finding | None:
    """Report what `--observe.timeline auto` would record under this launcher."""
    if facts.info.size == 1 or facts.info.launcher == TORCHRUN:  # without Horovod
        return None
    known = Facts(facts.info, facts.machine.host, facts.mpi.library, facts.environ)
    record = facts.installation.record
    plan = decide(AUTO, known, quiet=record is not None and record.quiet)
    if plan.kind != "spans":
        return Finding("timeline", "ok", str(plan))
    how = f"to record Horovod's own: {ASK}"
    if decide(AUTO, known, quiet=True).kind == "window":
        how += f"; a Horovod built by hvdtrain records it automatically: {BUILD_COMMAND}"
    return Finding("timeline", "ok", str(plan), how)
