"""Checks of what this machine gives to its ranks: cores, memory, limits, and the run folder."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.facts.machine import UNLIMITED
from hvdtrain.doctor.report import Finding
from hvdtrain.runtime.environment import NO_LAUNCHER
from hvdtrain.runtime.host import cpu_ranges
from hvdtrain.runtime.rules import THREADS, Facts

_MIB, _GIB = 1 << 20, 1 << 30
_SHM_PER_RANK = 64 * _MIB
_SHM_OPEN_MPI_PER_RANK = 4 * _MIB
_MEMORY_PER_RANK = _GIB // 2
_FILES, _FILES_PER_RANK = 256, 4
_PROCESSES_PER_RANK = 64
_LOCKED_BYTES = 64 * _MIB

_LITTLE_BYTES = 1 << 30
_ON_SERVERS = re.compile(
    r"nfs4?|lustre|beegfs|gpfs|wekafs|ceph|cifs|smb3|smbfs|glusterfs|afs|pvfs2|orangefs|panfs|9p|virtiofs"
    r"|fuse\.(glusterfs|sshfs|juicefs|s3fs|gcsfuse|ceph|beegfs)"
)
"""Types of file systems that several hosts can mount."""


def host(facts: DoctorFacts) -> Finding:
    """Describe the machine."""
    system, cores, own = facts.machine.system, facts.machine.host.cores, facts.machine.host.own_cores
    bound = f" ({own} usable by this process)" if own != cores else ""
    found = f"{facts.info.host}: {system['cpu']}, {cores} cores{bound}, {system['memory']}, {system['kernel']}"
    limit = f"a control group limits CPU time to {cores} of {facts.machine.processors} processors"
    return Finding("host", "ok", found, limit if facts.machine.host.quota else "")


def binding(facts: DoctorFacts) -> Finding | None:
    """Check that the launcher did not bind this rank to fewer cores than its share."""
    found, share = facts.machine.host, facts.machine.host.cores // facts.info.local_size
    if facts.info.launcher == NO_LAUNCHER or found.own_cores >= share:
        return None
    why = f"its share is {share} of {found.cores}; the rest is idle (Open MPI's default is one core per rank)"
    fix = "mpirun --bind-to none --map-by slot ..., or hvdtrain launch, which sets this"
    return Finding("binding", "warning", f"this rank is bound to {found.own_cores} core(s)", why, fix)


def locality(facts: DoctorFacts) -> Finding | None:
    """Describe which cores are near which GPU, and check that this process may use some near its own."""
    machine, near = facts.machine, {address: cpus for address, cpus in facts.gpu.near.items() if cpus}
    if len(machine.domains) < 2 and not near:
        return None
    domains = "; ".join(map(cpu_ranges, machine.domains))
    found = f"{len(machine.domains)} NUMA domain(s): cores {domains}" if domains else "no NUMA domains"
    for cpus in dict.fromkeys(near.values()):
        found += f"; near cores {cpu_ranges(cpus)}: GPU {', '.join(a for a in near if near[a] == cpus)}"
    own: list[str] = list(facts.installation.torch.values.get("pci", []))
    if facts.info.launcher != NO_LAUNCHER and len(own) > 1:
        own = own[facts.info.local_rank :][:1]
    far = [address for address in own if address in near and not near[address] & machine.allowed]
    if not far:
        return Finding("locality", "ok", found)
    wanted = cpu_ranges(frozenset[int]().union(*(near[address] for address in far)))
    why = f"this process may use cores {cpu_ranges(machine.allowed)}, none of them near GPU {', '.join(far)}: copies to"
    why += " it and its loaders cross the link between sockets"
    fix = f"allow cores {wanted}: srun --gpu-bind=closest --distribution=block:block, more cores by hvdtrain launch"
    fix += f" --cpus_per_rank N, or docker run --cpuset-cpus={wanted}"
    return Finding("locality", "warning", found, why, fix)


def oversubscription(facts: DoctorFacts) -> Finding | None:
    """Check that the ranks have no more threads than there are cores."""
    known = Facts(facts.info, facts.machine.host, facts.mpi.library, facts.environ)
    cores, busy = facts.machine.host.cores, facts.info.local_size * known.threads
    if busy <= cores:
        return None
    limit = f" (the container's quota; the machine has {facts.machine.processors})" if facts.machine.host.quota else ""
    found = f"{facts.info.local_size} rank(s) of {known.threads} thread(s) on {cores} core(s){limit}"
    why = "threads compete for cores: each step is as slow as its slowest rank, and waiting ranks slow down busy ones"
    fix = f"unset {THREADS}, or set {THREADS}={cores // facts.info.local_size}"
    if facts.info.local_size > cores:
        fix = f"start at most {cores} ranks on this host"
    return Finding("oversubscription", "warning", found, why, fix)


def memory(facts: DoctorFacts) -> Finding | None:
    """Check that a container's memory limit is large enough for its ranks."""
    limit, ranks = facts.machine.memory_limit_bytes, facts.info.local_size
    if limit is None or limit >= facts.machine.memory_bytes:
        return None
    found = f"{limit / _GIB:.1f} of {facts.machine.memory_bytes / _GIB:.1f} GiB (control group)"
    if limit >= ranks * _MEMORY_PER_RANK:
        return Finding("memory", "ok", found)
    why = f"{ranks} rank(s) need {_MEMORY_PER_RANK // _MIB} MiB each for Python and torch alone"
    fix = "raise it: sbatch --mem, docker run --memory, or resources.limits.memory of the pod"
    return Finding("memory", "warning", found, why, fix)


def shared_memory(facts: DoctorFacts) -> Finding | None:
    """Check that /dev/shm has room for loader workers, NCCL and MPI."""
    total, free, ranks = facts.machine.shm_bytes, facts.machine.shm_free_bytes, facts.info.local_size
    fix = "docker run --shm-size=8g or --ipc=host; in a pod: mount an emptyDir with medium Memory at /dev/shm"
    if total is None or free is None:
        return Finding("shm", "warning", "no /dev/shm", "loader workers and MPI exchange data there", fix)
    found = f"{_size(free)} free of {_size(total)} in /dev/shm"
    if free >= ranks * _SHM_PER_RANK and total > _SHM_PER_RANK:
        return Finding("shm", "ok", found, minor=True)
    why = "loader workers and NCCL exchange data there and fail when it is full (No space left on device)"
    if free < ranks * _SHM_OPEN_MPI_PER_RANK:
        why += "; Open MPI needs 4 MiB per rank and falls back to TCP without it"
    if total > _SHM_PER_RANK:
        fix = f"remove the files that killed jobs left there (ls -l /dev/shm); or {fix}"
    return Finding("shm", "warning", found, why, f"{fix}; or --loader.workers 0")


def open_files(facts: DoctorFacts) -> Finding:
    """Check that a rank may open a connection to each peer."""
    limits, needed = facts.machine.limits, _FILES + _FILES_PER_RANK * facts.info.size
    if not _below(limits.files, needed):
        return Finding("files", "ok", f"{_number(limits.files)} open files", minor=True)
    why = f"{facts.info.size} rank(s) and their loader workers may open {needed} files in one process"
    fix = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    return Finding("files", "warning", f"{limits.files} open files at most (ulimit -Hn)", why, fix)


def processes(facts: DoctorFacts) -> Finding:
    """Check that the ranks of this host may start their threads."""
    limit, needed = facts.machine.limits.processes, facts.info.local_size * _PROCESSES_PER_RANK
    if facts.machine.is_root or not _below(limit, needed):
        return Finding("processes", "ok", f"{_number(limit)} processes and threads", minor=True)
    why = f"{facts.info.local_size} rank(s) with their threads and loader workers may need {needed}"
    fix = f"ulimit -u {needed}, or raise nproc in /etc/security/limits.conf"
    return Finding("processes", "warning", f"{limit} processes and threads (ulimit -u)", why, fix)


def locked_memory(facts: DoctorFacts) -> Finding | None:
    """Check that memory can be locked if there is an RDMA network card."""
    limit = facts.machine.limits.locked_bytes
    if not facts.network.rdma:
        return None
    if not _below(limit, _LOCKED_BYTES):
        return Finding("memlock", "ok", f"{_number(limit)} bytes of memory may be locked", minor=True)
    why = "InfiniBand and RoCE need locked memory: without it NCCL and UCX fail or use TCP"
    fix = (
        "set memlock to unlimited in /etc/security/limits.conf; Slurm: PropagateResourceLimitsExcept=MEMLOCK;"
        " docker run --ulimit memlock=-1"
    )
    return Finding("memlock", "warning", f"{limit // 1024} KiB of memory may be locked (ulimit -l)", why, fix)


def huge_pages(facts: DoctorFacts) -> Finding | None:
    """Check that programs can request transparent huge pages."""
    setting = facts.machine.huge_pages
    if setting in ("always", "madvise"):
        return Finding("huge_pages", "ok", f"{setting} (transparent huge pages)", minor=True)
    why = "exchanges of large tensors take 1.4 times as long as with huge pages"
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge_pages", "warning", f"{setting or 'none'} (transparent huge pages)", why, fix)


def _below(limit: int, needed: int) -> bool:
    return limit != UNLIMITED and limit < needed


def _number(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def run_dir(facts: DoctorFacts) -> Finding:
    """Check that the run folder is writable and has enough space."""
    wanted, answer = str(facts.run_dir), facts.storage
    if answer.error:
        why = f"checking it failed: {answer.error}; a file server that hangs blocks every save"
        fix = "run df on that folder; or use --run_dir on another file system"
        return Finding("run_dir", "broken", wanted, why, fix)
    values = answer.values
    kind, free_bytes = values["type"], int(values["free_bytes"])
    found = f"{values['folder']} ({kind}), {free_bytes / 2**30:.1f} GiB free"
    if problem := values.get("problem"):
        why = f"it is not writable: {problem}"
        return Finding("run_dir", "broken", found, why, "use --run_dir with another folder")
    if free_bytes < _LITTLE_BYTES:
        why = "a checkpoint with AdamW takes 12 bytes per parameter, and several are kept"
        fix = "free some space, or use --run_dir on another disk or --checkpoint.keep 1"
        return Finding("run_dir", "warning", found, why, fix)
    if kind in ("tmpfs", "ramfs"):
        why = "it is in memory: checkpoints take memory and are lost when the machine reboots"
        return Finding("run_dir", "warning", found, why, "use --run_dir on a disk")
    return Finding("run_dir", "ok", found)


def run_dir_shared(facts: DoctorFacts) -> Finding | None:
    """Check that all hosts of a job share the run folder."""
    values = facts.storage.values
    if facts.info.one_host or "type" not in values:
        return None
    kind = str(values["type"])
    if _ON_SERVERS.fullmatch(kind):
        return Finding("run_dir_shared", "ok", f"{kind}: a file system for several hosts", minor=True)
    why = (
        "the job has several hosts: rank 0 then writes all checkpoints alone, and a resumed run needs rank 0 on this"
        " host"
    )
    fix = "use --run_dir on a file system that all hosts mount"
    return Finding("run_dir_shared", "warning", f"{kind}: local to this host", why, fix)
