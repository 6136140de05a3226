"""What the machine gives to the ranks on it: cores, memory, limits."""

from __future__ import annotations

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.facts.machine import UNLIMITED
from hvdtrain.doctor.finding import Finding
from hvdtrain.runtime.environment import NO_LAUNCHER
from hvdtrain.runtime.rules import THREADS, Facts

_MIB, _GIB = 1 << 20, 1 << 30
_SHM_A_RANK = 64 * _MIB
_SHM_OPEN_MPI_A_RANK = 4 * _MIB
_MEMORY_A_RANK = _GIB // 2
_FILES, _FILES_A_RANK = 256, 4
_PROCESSES_A_RANK = 64
_LOCKED = 64 * _MIB


def host(facts: Gathered) -> Finding:
    """Describe the machine."""
    system, cores, own = facts.machine.system, facts.machine.host.cores, facts.machine.host.own_cores
    bound = f", {own} of them this process's" if own != cores else ""
    text = f"{facts.info.host}: {system['cpu']}, {cores} cores{bound}, {system['memory']}, {system['kernel']}"
    return Finding("host", "ok", text)


def binding(facts: Gathered) -> Finding | None:
    """See that the launcher did not bind this rank to less than its share of the cores."""
    found, share = facts.machine.host, facts.machine.host.cores // facts.info.local_size
    if facts.info.launcher == NO_LAUNCHER or found.own_cores >= share:
        return None
    why = f"its share is {share} of {found.cores}: the rest is idle (plain mpirun of Open MPI binds a rank to one core)"
    mend = "mpirun --bind-to none --map-by slot ..., or hvdtrain launch, which chooses it"
    return Finding("binding", "warning", f"this rank is bound to {found.own_cores} core(s)", why, mend)


def oversubscription(facts: Gathered) -> Finding | None:
    """See that ranks and their threads are not more than the cores."""
    known = Facts(facts.info, facts.machine.host, facts.mpi.library, facts.environ)
    cores, busy = facts.machine.host.cores, facts.info.local_size * known.threads
    if busy <= cores:
        return None
    limit = f", all that this container's quota gives of {facts.machine.processors}" if facts.machine.host.quota else ""
    found = f"{facts.info.local_size} rank(s) of {known.threads} thread(s) on {cores} core(s){limit}"
    why = "they take turns: a step lasts as long as its slowest rank, and waiting ranks take cores of working ones"
    if facts.info.local_size > cores:
        mend = f"at most {cores} ranks on this host"
    else:
        mend = f"unset {THREADS}, or {THREADS}={cores // facts.info.local_size}"
    return Finding("oversubscription", "warning", found, why, mend)


def quota(facts: Gathered) -> Finding | None:
    """Say how much less than the machine's a container's processor time is."""
    cores, all_of_it = facts.machine.host.cores, facts.machine.processors
    if not facts.machine.host.quota or cores >= all_of_it:
        return None
    why = "programs that count processors start too many threads, and all of them stand still once the quota is used up"
    found = f"{cores} of {all_of_it} processors' time (control group)"
    return Finding("quota", "ok", found, f"{why}; {THREADS} is set to fit, loader workers count too")


def memory(facts: Gathered) -> Finding | None:
    """See that a container's limit leaves memory for its ranks."""
    limit, ranks = facts.machine.memory_limit_bytes, facts.info.local_size
    if limit is None or limit >= facts.machine.memory_bytes:
        return None
    found = f"{limit / _GIB:.1f} of {facts.machine.memory_bytes / _GIB:.1f} GiB (control group)"
    if limit >= ranks * _MEMORY_A_RANK:
        return Finding("memory", "ok", found)
    why = f"{ranks} rank(s) need {_MEMORY_A_RANK // _MIB} MiB each for Python and torch alone; over it the kernel kills"
    return Finding(
        "memory", "warning", found, why, "sbatch --mem, docker run --memory, resources.limits.memory of the pod"
    )


def shared_memory(facts: Gathered) -> Finding | None:
    """See that /dev/shm holds what ranks and loader workers exchange there."""
    total, free, ranks = facts.machine.shm_bytes, facts.machine.shm_free_bytes, facts.info.local_size
    mend = "docker run --shm-size=8g, or --ipc=host; a pod: an emptyDir of medium Memory at /dev/shm"
    if total is None or free is None:
        return Finding("shm", "warning", "no /dev/shm", "loader workers and MPI hand over data there", mend)
    found = f"{_size(free)} free of {_size(total)} in /dev/shm"
    if free >= ranks * _SHM_A_RANK and total > _SHM_A_RANK:
        return Finding("shm", "ok", found, minor=True)
    why = "loader workers hand over batches there and fail when it is full (No space left on device), as NCCL does"
    if free < ranks * _SHM_OPEN_MPI_A_RANK:
        why += "; Open MPI, which takes 4 MiB a rank, does without shared memory"
    if total > _SHM_A_RANK:
        mend = f"rm what is left there of jobs that were killed (ls -l /dev/shm); or {mend}"
    return Finding("shm", "warning", found, why, f"{mend}; or --loader.workers 0")


def open_files(facts: Gathered) -> Finding:
    """See that a rank may open as many files as it has peers."""
    limits, needed = facts.machine.limits, _FILES + _FILES_A_RANK * facts.info.size
    if not _below(limits.files, needed):
        return Finding("files", "ok", f"{_number(limits.files)} open files", minor=True)
    why = f"{facts.info.size} rank(s) and their loader workers want up to {needed} in one process: Too many open files"
    room = not _below(limits.most_files, needed)
    mend = f"ulimit -n {max(needed, 65536) if limits.most_files == UNLIMITED else limits.most_files}"
    mend = mend if room else "nofile in /etc/security/limits.conf; docker run --ulimit nofile=65536"
    return Finding("files", "warning", f"{limits.files} open files at most (ulimit -n)", why, mend)


def processes(facts: Gathered) -> Finding:
    """See that the ranks of this host may start their threads."""
    limit, needed = facts.machine.limits.processes, facts.info.local_size * _PROCESSES_A_RANK
    if facts.machine.is_root or not _below(limit, needed):
        return Finding("processes", "ok", f"{_number(limit)} processes and threads", minor=True)
    why = f"{facts.info.local_size} rank(s) with threads and loader workers want up to {needed} of this user"
    mend = f"ulimit -u {needed}, or nproc in /etc/security/limits.conf"
    return Finding("processes", "warning", f"{limit} processes and threads (ulimit -u)", why, mend)


def locked_memory(facts: Gathered) -> Finding | None:
    """See that memory can be locked, where a network card reads and writes it by itself."""
    limit = facts.machine.limits.locked_bytes
    if not facts.network.rdma:
        return None
    if not _below(limit, _LOCKED):
        return Finding("memlock", "ok", f"{_number(limit)} bytes may be locked", minor=True)
    why = "InfiniBand and RoCE need locked memory: NCCL and UCX fail, or talk by TCP"
    mend = (
        "memlock unlimited in /etc/security/limits.conf, PropagateResourceLimitsExcept=MEMLOCK of Slurm,"
        " docker run --ulimit memlock=-1"
    )
    return Finding("memlock", "warning", f"{limit // 1024} KiB may be locked (ulimit -l)", why, mend)


def huge_pages(facts: Gathered) -> Finding | None:
    """See that the kernel gives huge pages to those who ask."""
    setting = facts.machine.huge_pages
    if setting in ("always", "madvise"):
        return Finding("huge_pages", "ok", f"{setting} (transparent huge pages)", minor=True)
    why = "an exchange of 33.5 MB takes 4.9 to 5.4 ms; where memory stands in huge pages, 3.5 to 3.7"
    mend = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge_pages", "warning", f"{setting or 'none'} (transparent huge pages)", why, mend)


def _below(limit: int, needed: int) -> bool:
    return limit != UNLIMITED and limit < needed


def _number(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
