"""Checks of the run folder: space, speed, and sharing between hosts."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding

_LITTLE_BYTES, _SLOW_MIB_PER_S, _SLOW_SYNC_MS = 1 << 30, 20, 250
_ON_SERVERS = re.compile(
    r"nfs4?|lustre|beegfs|gpfs|wekafs|ceph|cifs|smb3|smbfs|glusterfs|afs|pvfs2|orangefs|panfs|9p|virtiofs"
    r"|fuse\.(glusterfs|sshfs|juicefs|s3fs|gcsfuse|ceph|beegfs)"
)
"""Types of file systems that several hosts can mount."""


def run_dir(facts: DoctorFacts) -> Finding:
    """Check that the run folder is writable and has enough space."""
    wanted, answer = facts.storage.wanted, facts.storage.answer
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


def run_dir_speed(facts: DoctorFacts) -> Finding | None:
    """Check the write speed of the run folder."""
    values = facts.storage.answer.values
    if "mib_per_s" not in values:
        return None
    rate, sync_ms = float(values["mib_per_s"]), float(values["sync_ms"])
    found = f"{rate:.0f} MiB/s written and synced, {sync_ms:.1f} ms for one byte"
    if rate >= _SLOW_MIB_PER_S and sync_ms < _SLOW_SYNC_MS:
        return Finding("run_dir_speed", "ok", found, minor=True)
    why = "checkpoints are written in the background, but each one waits for the previous one"
    fix = "use --run_dir on a faster file system, or a larger --checkpoint.every"
    return Finding("run_dir_speed", "warning", found, why, fix)


def run_dir_shared(facts: DoctorFacts) -> Finding | None:
    """Check that all hosts of a job share the run folder."""
    values = facts.storage.answer.values
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
