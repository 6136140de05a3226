"""Look at a run again and again while it trains; ``python -m hvdtrain.timeline.watcher RUN`` at each line of stdin.

A run starts that program once, so that each look reads only what is new. It ends with the run, which closes its stdin.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.errors import TraceError
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis
from hvdtrain.timeline.report.terminal import verdicts
from hvdtrain.timeline.run import load, run_folder
from hvdtrain.timeline.run_files import RunFiles

_MOST_BYTES = 1 << 25


class Watcher:
    """Analyses a run while it grows; each time it reads only what is new."""

    def __init__(self, run: Path) -> None:
        self._run, self._files = run, RunFiles(run_folder(run), grows=True)

    def look(self) -> Analysis:
        """Return the analysis of the run so far. Errors: TraceError, such as for a run that has not begun."""
        return analyse(load(self._run, most_bytes=_MOST_BYTES, files=self._files))


def as_plain(analysis: Analysis) -> dict[str, Any]:
    """Return the last step, the verdicts and the goodput of a look, for JSON."""
    step = analysis.over_time.moments[-1].last_step if analysis.over_time is not None else 0
    goodput = analysis.goodput.share if analysis.goodput is not None else None
    return {"version": 1, "step": step, "verdicts": verdicts(analysis), "goodput": goodput}


def main(run: Path) -> None:
    """Answer each line of stdin by one of JSON: `as_plain` and the CPU seconds that it took, or an error."""
    watcher, began_s = Watcher(run), 0.0
    for _ in sys.stdin.buffer:
        try:
            found = as_plain(watcher.look())
        except TraceError as error:
            found = {"error": error.what}
        now_s = time.process_time()
        sys.stdout.buffer.write(orjson.dumps({**found, "cpu_s": now_s - began_s}, option=orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
        began_s = now_s


if __name__ == "__main__":
    main(Path(sys.argv[1]))
