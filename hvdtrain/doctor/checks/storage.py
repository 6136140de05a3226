"""Whether the folder that runs are written to serves."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding

_GIB = 1 << 30
_LITTLE, _SLOW_MIB_PER_S, _SLOW_SYNC_MS = _GIB, 20, 250
_ON_SERVERS = re.compile(
    r"nfs4?|lustre|beegfs|gpfs|wekafs|ceph|cifs|smb3|smbfs|glusterfs|afs|pvfs2|orangefs|panfs|9p|virtiofs"
    r"|fuse\.(glusterfs|sshfs|juicefs|s3fs|gcsfuse|ceph|beegfs)"
)
"""Types of file systems that several hosts can see."""
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))


def run_dir(facts: Gathered) -> Finding:
    """See that the folder can be written to and has room."""
    wanted, answer = facts.storage.wanted, facts.storage.answer
    if answer.error:
        why = f"looking at it ended so: {answer.error}; a file server that hangs stops every save"
        return Finding("run_dir", "broken", wanted, why, "df on that folder; --run_dir on another file system")
    values = answer.values
    folder, kind, free = values["folder"], values["type"], int(values["free_bytes"])
    found = f"{folder} ({kind}), {free / _GIB:.1f} GiB free"
    if problem := values.get("problem"):
        return Finding("run_dir", "broken", found, f"cannot be written to: {problem}", "--run_dir in another folder")
    if free < _LITTLE:
        why = "a checkpoint of a model with AdamW takes 12 bytes a parameter, and several are kept"
        return Finding("run_dir", "warning", found, why, "free some, --run_dir on another disk, or --checkpoint.keep 1")
    if kind in _IN_MEMORY:
        why = "it is in memory: runs and checkpoints are gone when the machine starts anew, and they take its memory"
        return Finding("run_dir", "warning", found, why, "--run_dir on a disk")
    return Finding("run_dir", "ok", found)


def run_dir_speed(facts: Gathered) -> Finding | None:
    """See how fast data gets onto the disk."""
    values = facts.storage.answer.values
    if "mib_per_s" not in values:
        return None
    rate, sync_ms = float(values["mib_per_s"]), float(values["sync_ms"])
    found = f"{rate:.0f} MiB/s onto the disk, {sync_ms:.1f} ms for one byte"
    if rate >= _SLOW_MIB_PER_S and sync_ms < _SLOW_SYNC_MS:
        return Finding("run_dir_speed", "ok", found, minor=True)
    why = "checkpoints are written beside training, but the next one waits for the one before"
    mend = "--run_dir on a faster file system, or --checkpoint.every larger"
    return Finding("run_dir_speed", "warning", found, why, mend)


def run_dir_shared(facts: Gathered) -> Finding | None:
    """See that a job of several hosts writes where all of them can read."""
    values = facts.storage.answer.values
    if facts.info.one_host or "type" not in values:
        return None
    kind = str(values["type"])
    if _ON_SERVERS.fullmatch(kind):
        return Finding("run_dir_shared", "ok", f"{kind}: a file server's", minor=True)
    why = (
        "the ranks are on several hosts: rank 0 then writes alone what all could write together, and the run goes on"
        " only where rank 0 is on this host again"
    )
    return Finding(
        "run_dir_shared", "warning", f"{kind}: this host's own", why, "--run_dir on a file system of all hosts"
    )
