"""``python -m benchmarks [--quick] [--json FILE]``: every benchmark, one table."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from common import Figure, main  # noqa: E402

SCRIPTS = (
    "step",
    "engines",
    "engines --two_hosts",
    "engine_parts",
    "memory",
    "fit",
    "lockstep",
    "drop_in",
    "two_hosts",
    "time_to_loss",
    "slow_links",
    "resnet",
    "overhead",
    "spans",
    "experts",
    "mesh",
    "load_peak",
    "long_texts",
    "optimizers",
    "timeline",
    "timeline_cost",
    "long_runs",
    "whatif",
    "checkpoint",
    "recovery",
    "startup",
    "rendezvous",
    "scale",
    "straggler",
    "balance",
    "compressors",
    "exchange",
    "exact",
    "transport",
)
"""Each with its options."""


def measure(quick: bool) -> list[Figure]:
    """Run each script by itself, in turn."""
    figures = []
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.json"
            script, *further = name.split()
            print(f"benchmarks/{script}.py {' '.join(further)} ...", flush=True)
            subprocess.run(
                [
                    *(sys.executable, str(HERE / f"{script}.py"), "--json", str(file)),
                    *(["--quick"] if quick else []),
                    *further,
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            figures += [Figure(**result) for result in json.loads(file.read_text())["results"]]
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
