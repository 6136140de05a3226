"""One line for several runs of pytest, of what ``--tally FILE`` noted: ``python -m tests.support.tally FILE``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

OUTCOMES = ("passed", "skipped", "failed", "error")


def main(file: str) -> int:
    """Print it; 1 where a test has failed."""
    total: Counter[str] = Counter()
    for line in Path(file).read_text().splitlines():
        total.update(json.loads(line))
    minutes, seconds = divmod(round(total["seconds"]), 60)
    counts = ", ".join(f"{total[kind]} {kind}" for kind in OUTCOMES if total[kind])
    print(f"all together: {counts} in {minutes} min {seconds} s")
    return int(bool(total["failed"] or total["error"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
