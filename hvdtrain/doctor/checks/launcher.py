"""Whether the ranks that the launcher started can work together, and how."""

from __future__ import annotations

from hvdtrain.config.windows import AUTO
from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.runtime.environment import NO_LAUNCHER, rank_label
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.timeline import ASK, decide
from hvdtrain.runtime.tuning import of_others


def launcher(facts: Gathered) -> Finding:
    """Name the launcher of this process, and see that Horovod speaks its MPI."""
    found, refusal = f"{facts.info.launcher}, {rank_label(facts.info)}", facts.mpi.refusal
    if refusal is not None:
        return Finding(
            "launcher", "broken", found, f"{refusal.what} Expected: {refusal.expected}", refusal.next_step or ""
        )
    note = "one process: start it by mpirun, horovodrun or srun for more" if facts.info.launcher == NO_LAUNCHER else ""
    return Finding("launcher", "ok", found, note)


def half_over_gloo(facts: Gathered) -> Finding | None:
    """Warn of fp16 compression where Gloo would sum halves on the CPU."""
    if facts.info.launcher != "horovod-gloo" or facts.installation.torch.values.get("gpus"):
        return None
    why = "fp16 compression is slow here: 93 ms for what MPI does in 3.5; keep --parallel.compression none"
    return Finding("gloo", "warning", "ranks talk by Gloo, on the CPU", why, "horovodrun --mpi, or mpirun")


def timeline(facts: Gathered) -> Finding | None:
    """Say what `--observe.timeline auto` would record under this launcher."""
    if facts.info.size == 1:
        return None
    known = Facts(facts.info, facts.machine.host, facts.mpi.library, of_others(facts.environ))
    record = facts.installation.record
    plan = decide(AUTO, known, quiet=record is not None and record.quiet)
    if plan.kind != "spans":
        return Finding("timeline", "ok", str(plan))
    how = f"Horovod's own: {ASK}"
    if decide(AUTO, known, quiet=True).kind == "window":
        how += f"; by itself with a Horovod whose writer sleeps: {BUILD_COMMAND}"
    return Finding("timeline", "ok", str(plan), how)
