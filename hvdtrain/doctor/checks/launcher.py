"""Whether the ranks that the launcher started can work together, and how."""

from __future__ import annotations

import re

from hvdtrain.config.windows import AUTO
from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.runtime.environment import GLOO_LAUNCHER, LAUNCHERS, NO_LAUNCHER, elastic, rank_label
from hvdtrain.runtime.exposure import exposed
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.timeline import ASK, decide

_PMI = {"openmpi": ("PMIX_RANK", "pmix"), "mpich": ("PMI_RANK", "pmi2")}
"""What an MPI of each family learns its rank by from srun, and how that is asked for."""

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$")


def launcher(facts: Gathered) -> Finding:
    """Name the launcher of this process, and see that Horovod speaks its MPI."""
    found, refusal = f"{facts.info.launcher}, {rank_label(facts.info)}", facts.mpi.refusal
    if refusal is not None:
        why = f"{refusal.what} Expected: {refusal.expected}"
        return Finding("launcher", "broken", found, why, refusal.next_step or "")
    note = (
        "one process: start it by hvdtrain launch, mpirun, horovodrun or srun for more"
        if facts.info.launcher == NO_LAUNCHER
        else ""
    )
    return Finding("launcher", "ok", found, note)


def stale_launcher(facts: Gathered) -> Finding | None:
    """See that no variables of another launcher stand in the way, left over in a shell or a job script."""
    if facts.info.launcher != GLOO_LAUNCHER or elastic(facts.environ):
        return None
    ours, *others = (line for line in LAUNCHERS if line.name in (GLOO_LAUNCHER, "openmpi", "hydra"))
    says = {line: (facts.environ.get(line.rank), facts.environ.get(line.size)) for line in (ours, *others)}
    theirs = next((line for line in others if None not in says[line] and says[line] != says[ours]), None)
    if theirs is None:
        return None
    found = " and ".join(f"{line.rank}={says[line][0]} of {says[line][1]}" for line in (ours, theirs))
    why = "two launchers say which rank this is, and not the same: ranks take each other's place"
    mend = f"unset {' '.join(ours.signs)}   (or start it from a shell that no launcher started)"
    return Finding("launcher_variables", "broken", found, why, mend)


def controller(facts: Gathered) -> Finding | None:
    """See that Horovod is not told to meet by another way than the one by which its ranks were started."""
    asked = facts.environ.get("HOROVOD_CONTROLLER", "").lower()
    by = "gloo" if facts.info.launcher == GLOO_LAUNCHER else "mpi"
    if facts.info.launcher == NO_LAUNCHER or asked in ("", by):
        return None
    why = f"the ranks were started to meet by {by}: Horovod aborts, or each rank is alone"
    return Finding("controller", "broken", f"HOROVOD_CONTROLLER={asked}", why, "unset HOROVOD_CONTROLLER")


def slurm_step(facts: Gathered) -> Finding | None:
    """See that srun speaks to MPI in the way that it understands; where it doesn't speak at all, `launcher` says so."""
    library = facts.mpi.library
    if facts.mpi.refusal or facts.info.launcher != "slurm" or facts.info.size == 1 or library is None:
        return None
    sign, way = _PMI.get(library.family, ("", ""))
    if not sign or sign in facts.environ:
        return None
    found = f"{facts.info.size} ranks without {sign}"
    why = f"srun speaks another PMI than {library} is known to understand: it aborts, or each rank is alone"
    mend = f"srun --mpi={way} where srun --mpi=list shows it; else hvdtrain launch --to srun, which needs none"
    return Finding("srun", "warning", found, why, mend)


def rendezvous(facts: Gathered) -> Finding | None:
    """Say what horovodrun's rendezvous leaves open to others."""
    if not (why := exposed(facts.environ)):
        return None
    mend = "hvdtrain launch, or mpirun, in the place of horovodrun --gloo"
    return Finding("rendezvous", "warning", "open to the network", why, mend)


def secrets(facts: Gathered) -> Finding | None:
    """Name variables that ``horovodrun --gloo`` shows to all users of the hosts, among the words of its commands."""
    if facts.info.launcher != GLOO_LAUNCHER or elastic(facts.environ):
        return None
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in facts.environ or "/" in facts.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]:
        return None
    names = sorted(name for name in facts.environ if _SECRET.search(name.upper()))
    if not names:
        return None
    why = (
        "horovodrun --gloo writes each variable with its value on a command line, which every user of the host can"
        " read (ps); it connects without looking at host keys"
    )
    mend = "hvdtrain launch, or mpirun, in the place of horovodrun --gloo; then change these secrets"
    return Finding("secrets", "warning", ", ".join(names), why, mend)


def half_over_gloo(facts: Gathered) -> Finding | None:
    """Warn of fp16 compression where Gloo would sum halves on the CPU."""
    if facts.info.launcher != GLOO_LAUNCHER or facts.installation.torch.values.get("gpus"):
        return None
    why = "fp16 compression is slow here: 93 ms for what MPI does in 3.5; keep --parallel.compression none"
    return Finding("gloo", "warning", "ranks talk by Gloo, on the CPU", why, "horovodrun --mpi, or mpirun")


def timeline(facts: Gathered) -> Finding | None:
    """Say what `--observe.timeline auto` would record under this launcher."""
    if facts.info.size == 1:
        return None
    known = Facts(facts.info, facts.machine.host, facts.mpi.library, facts.environ)
    record = facts.installation.record
    plan = decide(AUTO, known, quiet=record is not None and record.quiet)
    if plan.kind != "spans":
        return Finding("timeline", "ok", str(plan))
    how = f"Horovod's own: {ASK}"
    if decide(AUTO, known, quiet=True).kind == "window":
        how += f"; by itself with a Horovod whose writer sleeps: {BUILD_COMMAND}"
    return Finding("timeline", "ok", str(plan), how)
