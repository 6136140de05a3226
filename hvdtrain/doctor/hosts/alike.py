"""Whether hosts have the same of what has to be the same: each a line of `ALIKE`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.doctor.finding import Finding, Level
from hvdtrain.doctor.hosts.host_facts import HostSays
from hvdtrain.doctor.hosts.host_text import by_value, names
from hvdtrain.doctor.hosts.survey import Survey
from hvdtrain.install.record import BUILD_COMMAND

_SAME = "install the same on all hosts, or one environment on a file system of all"
_FEW_FILES = 1024


@dataclass(frozen=True)
class _Same:
    """What all hosts should have alike.

    Attributes:
        name: of the finding.
        value: of a host.
        level: where they differ.
        why, mend, minor: as a `Finding` has them.
    """

    name: str
    value: Callable[[HostSays], object]
    level: Level
    why: str
    mend: str = _SAME
    minor: bool = False


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release(text: str) -> str:
    """Name and release of an MPI, however its library and its mpirun word them."""
    return text.replace("mpirun (", "").replace(")", "").replace(" v", " ")


ALIKE: Sequence[_Same] = (
    _Same("hvdtrain", lambda said: said.hvdtrain, "broken", "ranks of different versions wait for each other for ever"),
    _Same("python", lambda said: _minor(said.python), "warning", "packages are built for one of them"),
    _Same("torch", lambda said: said.torch, "broken", "Horovod is built for one of them"),
    _Same("horovod", lambda said: said.horovod, "broken", "it is built for one torch and one MPI", BUILD_COMMAND),
    _Same("libmpi", lambda said: said.libmpi, "broken", "ranks on different MPIs do not find each other"),
    _Same(
        "mpirun",
        lambda said: _release(said.mpirun),
        "warning",
        "mpirun starts its helper (orted, prted, hydra_pmi_proxy) on each host, which has to be of the same release "
        "and on the PATH that ssh gives a command",
        "put it on PATH in ~/.bashrc, above the line that ends it for shells that are not interactive; Open MPI: "
        "mpirun --prefix FOLDER",
    ),
    _Same(
        "machine", lambda said: said.machine, "broken", "ranks would exchange numbers in different shapes", minor=True
    ),
    _Same("kernel", lambda said: said.kernel, "ok", "they differ, which is no harm by itself", minor=True),
    _Same(
        "cores",
        lambda said: said.cores,
        "warning",
        "every step waits for the slowest rank, and ranks share a host's cores",
        "give fewer ranks to the smaller host: --hosts a:4,b:2, as of -H",
    ),
    _Same(
        "gpus",
        lambda said: ", ".join(f"{said.gpus.count(name)} x {name}" for name in dict.fromkeys(said.gpus)),
        "warning",
        "every step waits for the slowest GPU",
        "one rank for each GPU, as --hosts a:4,b:2 would have it; and hosts of one kind to a job",
    ),
    _Same("driver", lambda said: said.driver, "warning", "the older one decides which CUDA runs everywhere"),
)


def alike(survey: Survey) -> list[Finding]:
    """Compare all hosts that have spoken, a finding a line; what no host has is left out."""
    found = []
    for line in ALIKE:
        values = {host: line.value(said) for host, said in survey.says.items()}
        if not any(values.values()):
            continue
        if len(set(map(str, values.values()))) == 1:
            everywhere = "" if len(values) == 1 else f" on all {len(values)} hosts"
            found.append(Finding(line.name, "ok", f"{by_value(values)}{everywhere}", minor=line.minor))
        else:
            mend = "" if line.level == "ok" else line.mend
            found.append(Finding(line.name, line.level, by_value(values), line.why, mend))
    return found


def horovod_there(survey: Survey) -> list[Finding]:
    """Name the hosts on which Horovod cannot run."""
    wrong = {host: said.horovod_wrong for host, said in survey.says.items() if said.horovod_wrong}
    return [Finding(f"horovod {host}", "broken", why, "", f"on {host}: {BUILD_COMMAND}") for host, why in wrong.items()]


def limits(survey: Survey) -> list[Finding]:
    """Look at how much a process may open and hold, on each host as ssh gives it: ranks get no more."""
    few = {h: said.open_files for h, said in survey.says.items() if 0 <= said.open_files < _FEW_FILES}
    held = {h: said.locked_bytes for h, said in survey.says.items() if said.fabric and said.locked_bytes >= 0}
    found = []
    if few:
        why = "each rank holds a connection to each other, and files of data beside them"
        mend = "nofile in /etc/security/limits.conf there, and log in anew"
        found.append(Finding("open files", "warning", by_value(few), why, mend))
    if held:
        why = "InfiniBand and RoCE pin memory; what may not be locked fails, or goes by TCP"
        mend = "memlock unlimited in /etc/security/limits.conf there; of sshd: LimitMEMLOCK=infinity"
        found.append(Finding("locked memory", "warning", f"{by_value(held)} bytes", why, mend))
    return found


def folder(survey: Survey) -> list[Finding]:
    """See that the working folder is there, and the same, on all hosts."""
    where = survey.folder
    if not survey.says:
        return []  # nobody could be asked
    lacking = [host for host, said in survey.says.items() if not said.folder]
    if lacking:
        why = f"not there on {names(lacking)}: ranks are started in it"
        return [Finding("folder", "broken", where, why, f"mkdir -p it there, or start from a folder of all: {where}")]
    if not survey.writer:
        why = "no host can write there: neither runs nor checkpoints could be kept"
        return [Finding("folder", "broken", where, why, "start from a folder that can be written")]
    blind = [host for host, sees in survey.sees.items() if not sees]
    if blind:
        why = (
            f"{names(blind)}: what {survey.writer} writes there is not seen; the run's folder, its checkpoints and "
            "spans stay on rank 0's host, and config, task and data have to be copied to each"
        )
        mend = "start from a folder of a file system that all hosts mount, or leave it so and copy"
        return [Finding("folder", "warning", f"{where}, not shared", why, mend)]
    return [Finding("folder", "ok", f"{where}, {'shared' if len(survey.sees) > 1 else 'can be written'}")]


def twice(survey: Survey) -> list[Finding]:
    """Notice one host under two names."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for host, address in survey.addresses.items():
        hosts.setdefault((survey.says[host].name, address), []).append(host)
    return [
        Finding("same host", "warning", names(found), f"all are {name} at {address}", "name each host once")
        for (name, address), found in hosts.items()
        if len(found) > 1
    ]
