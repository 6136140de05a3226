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
    "lockstep",
    "drop_in",
    "two_hosts",
    "time_to_loss",
    "resnet",
    "overhead",
    "spans",
    "experts",
    "timeline",
    "timeline_cost",
    "whatif",
    "checkpoint",
    "recovery",
    "startup",
    "rendezvous",
    "straggler",
    "compressors",
    "exchange",
    "transport",
)


def measure(quick: bool) -> list[Figure]:
    """Run each script by itself, in turn."""
    figures = []
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.json"
            print(f"benchmarks/{name}.py ...", flush=True)
            subprocess.run(
                [sys.executable, str(HERE / f"{name}.py"), "--json", str(file), *(["--quick"] if quick else [])],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            figures += [Figure(**result) for result in json.loads(file.read_text())["results"]]
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
