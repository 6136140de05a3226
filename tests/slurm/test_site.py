"""A profile of a site on a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.launch import ROOT
from tests.support.slurm import GPUS, SLOTS, Slurm

PROFILE = f"""\
hosts: [a, b]
options:
  queue: low
  cpus_per_rank: {SLOTS // GPUS}
  interface: link0
environment:
  UCX_OF_SITE: "1"
"""


def test_a_profile_starts_a_job_on_two_nodes(two_nodes: Slurm, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    hvdtrain = [sys.executable, "-m", "hvdtrain"]
    file = tmp_path / "sites/tests.yaml"
    file.write_text(PROFILE)
    program = f"{tmp_path}/tell.sh"
    Path(program).write_text(
        '#!/bin/sh\necho "$SLURM_JOB_PARTITION $SLURM_CPUS_PER_TASK $UCX_OF_SITE" > "$SLURM_PROCID"\n'
    )
    Path(program).chmod(0o755)
    asked = ["--to", "slurm", "-np", "2", "--nodes", "2", "--time", "5m"]
    paths = {"PYTHONPATH": str(ROOT), "HVDTRAIN_SITES": str(tmp_path / "sites")}
    done = two_nodes.run([*hvdtrain, "launch", *asked, "--", program], cwd=tmp_path, environment=paths)
    assert f"; site tests ({file})" in done.stderr
    job = done.stdout.split()[-1]
    two_nodes.until(lambda: two_nodes.state(job) in ("COMPLETED", "FAILED"), "the job to end")
    log = "".join(path.read_text() for path in tmp_path.glob("hvdtrain-*.log"))
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"low {SLOTS // GPUS} 1\n"] * 2, log
