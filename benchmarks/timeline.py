"""How fast is a Timeline of Horovod read into columns, and in how much memory?

Beside `json.loads` of the same file, both from the disk (its cache is warm) to the result, each in a process of its
own, in turns; a figure is the ratio of speeds in a round. The traces are those of `timeline_traces.py`.

- timeline/vs_json_loads: a usual trace, ticks in its first steps only;
- timeline/vs_json_loads/ticks: with ticks of 8 ranks throughout, as without a response cache;
- timeline/peak_mib_1gb: the most memory that a process had which imported the reader and read 1 GiB.

``--hta PYTHON``, an interpreter that has HolisticTraceAnalysis: it reads no Timeline of Horovod (what it says to one is
printed), so that it is measured on what it does read, a trace of torch.profiler made here:

- timeline/hta_vs_json_loads: `json.loads` of that trace beside HolisticTraceAnalysis.

(TraceLens, AMD's, is not to be had by `pip install`; what has its name there is another program.)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import HERE, Figure, figure, options, ratios, report
from timeline_traces import USUAL, WITHOUT_CACHE, write

MIB = 1 << 20

OURS = """
from pathlib import Path
from hvdtrain.timeline.read import read_horovod
def read():
    trace = read_horovod(Path(FILE))
    assert not trace.dropped, trace.dropped
    return len(trace.phase)
"""
JSON = """
import json
def read():
    with open(FILE, "rb") as file:
        return len(json.loads(file.read()))
"""
HTA = """
import logging
logging.disable(logging.CRITICAL)
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserConfig
def read():
    return len(parse_trace_dataframe(FILE, ParserConfig())[1])
"""
MEASURE = """
import resource, sys, time
before = time.perf_counter()
count = read()
print(time.perf_counter() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, count)
"""
PROFILED = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(20)])
with torch.profiler.profile(record_shapes=True) as profile:
    for _ in range(STEPS):
        model(torch.ones(4, 32)).sum().backward()
profile.export_chrome_trace(FILE)
"""


def run(program: str, file: Path, python: str = sys.executable) -> tuple[float, float]:
    """Seconds and MiB of a reader in a process of its own."""
    text = f"FILE = {str(file)!r}\n{program}\n{MEASURE}"
    done = subprocess.run([python, "-c", text], capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    seconds, mib, _ = done.stdout.split()[-3:]
    return float(seconds), float(mib)


def race(program: str, file: Path, rounds: int, python: str = sys.executable) -> list[float]:
    """How many times as fast as `json.loads`, round by round."""
    times = [(run(JSON, file, python)[0], run(program, file, python)[0]) for _ in range(rounds)]
    return ratios([plain for plain, _ in times], [ours for _, ours in times])


def measure(quick: bool, hta: str | None) -> list[Figure]:
    rounds = 3 if quick else 7
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        for name, shape in (("timeline/vs_json_loads", USUAL), ("timeline/vs_json_loads/ticks", WITHOUT_CACHE)):
            write(file, (50 if quick else 200) * MIB, shape)
            found.append(figure(name, race(OURS, file, rounds), "ratio"))
        if hta is not None:
            found.append(measure_hta(hta, file, Path(folder), rounds))
        write(file, 1024 * MIB, USUAL)
        found.append(figure("timeline/peak_mib_1gb", [run(OURS, file)[1] for _ in range(1 if quick else 3)], "MiB"))
    return found


def measure_hta(python: str, timeline: Path, folder: Path, rounds: int) -> Figure:
    """HolisticTraceAnalysis on a trace of torch.profiler; what it says to a Timeline is printed."""
    profile = folder / "torch.json"
    subprocess.run([sys.executable, "-c", f"FILE = {str(profile)!r}\nSTEPS = 300\n{PROFILED}"], check=True)
    print(f"a trace of torch.profiler: {profile.stat().st_size / MIB:.0f} MiB")
    try:
        run(HTA, timeline, python)
        print("HolisticTraceAnalysis on a Timeline of Horovod: no error")
    except RuntimeError as error:
        print(f"HolisticTraceAnalysis on a Timeline of Horovod: {error}")
    return figure("timeline/hta_vs_json_loads", race(HTA, profile, rounds, python), "ratio")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hta", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    report(measure(arguments.quick, arguments.hta), arguments.json)


if __name__ == "__main__":
    main()
