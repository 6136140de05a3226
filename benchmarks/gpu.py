"""The acceptance test of a machine with a GPU, ``make gpu``: parts in order of worth, each with a time limit.

It leaves ``gpu.json`` and ``gpu.html`` in ``--out``, written again whenever a part has a result, and the output of each
part, ``NAME.log``; a part that fails does not stop the rest. The first part installs: from the folder of ``make
gpu-kit`` where nothing can be downloaded, else by ``make setup``. It runs in the Python that has torch and needs
nothing else.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the Python with torch has no hvdtrain yet

from hvdtrain.programs import end_group  # noqa: E402

RESULT = "RESULT "
"""What a line of `gpu_checks.py` with a result begins with; JSON follows."""
_END_S = 10.0
"""Between SIGTERM and SIGKILL for a part at its limit."""


@dataclass(frozen=True)
class Part:
    """A part: its name, the question it answers, its command, its time limit in seconds, the highest good exit code."""

    name: str
    question: str
    argv: tuple[str, ...]
    limit_s: float
    good: int = 0


@dataclass
class Outcome:
    """How a part ended."""

    name: str
    question: str
    command: str
    state: str = "not run yet"
    seconds: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)  # last lines of its output


def parts(python: str, options: argparse.Namespace) -> list[Part]:
    """Return the parts, most important first. `python`: the interpreter that the first part installs into."""
    if options.kit:
        install = ("sh", str(options.kit / "install.sh"), str(options.venv), options.python)
    else:
        install = ("make", "setup", f"PYTHON={options.python}")
    check = (python, str(ROOT / "benchmarks" / "gpu_checks.py"), "--device", options.device)
    quick = ("--quick",) if options.quick else ()
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
    return [
        Part("machine", "Which devices, drivers and versions are there?", (options.python, __file__, "--facts"), 60),
        Part("install", "Does Horovod build for this torch, CUDA and NCCL?", install, 300),
        Part("train", "Does the default job train, with the CPU's losses?", (*check, "train", *quick), 90),
        Part("modes", "Do other precisions and optimizers train as well?", (*check, "modes", *quick), 120),
        Part("share", "Do two ranks on one device have one rank's losses?", (*check, "share", *quick), 150),
        Part("resume", "Does a resumed run equal an uninterrupted one, bit for bit?", (*check, "resume", *quick), 60),
        Part("tests", "Do the tests that need a device pass?", tests, 180),
        Part("observe", "Are times, sensors and waits of the host right?", (*check, "observe", *quick), 60),
        Part("overhead", "How long is a step beside that of a bare loop?", (*check, "overhead", *quick), 120),
        Part("compressors", "How fast are compressors beside a copy?", (*check, "compressors", *quick), 60),
        Part("kernels", "Does an exchange start more kernels for more ranks?", (*check, "kernels", *quick), 30),
        Part("checkpoint", "How long does a checkpoint stop the steps?", (*check, "checkpoint", *quick), 45),
        Part("kill", "Do the others go on when a rank is killed?", (*check, "kill", *quick), 90),
        Part("memory", "Does running out of memory name the cause?", (*check, "memory", *quick), 60),
        Part("doctor", "What does hvdtrain doctor find?", (python, "-m", "hvdtrain", "doctor"), 60, good=1),
    ]


def run_part(part: Part, outcome: Outcome, limit_s: float, save: Callable[[], None], log: IO[str]) -> None:
    """Run a part to its end or its limit; keep its results as they come, and its output in `log`."""
    began = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # this clone, not the kit's copy
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    try:
        process = subprocess.Popen(
            part.argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True, env=environment,
        )  # fmt: skip
    except OSError as error:
        outcome.state = f"failed: {error}"
        return
    outcome.state = "running"
    timed_out = False
    for line in _lines(process, began + limit_s):
        print(line or "", file=log, flush=True)
        if line is None:
            timed_out = True
        elif line.startswith(RESULT):
            outcome.results.append(json.loads(line[len(RESULT) :]))
            save()
        else:
            outcome.tail = [*outcome.tail, line][-15:]
    outcome.seconds = round(time.monotonic() - began, 1)
    missed = [result["name"] for result in outcome.results if result.get("ok") is False]
    if timed_out:
        outcome.state = f"stopped at its limit of {limit_s:.0f} s"
    elif not 0 <= process.returncode <= part.good:
        outcome.state = f"failed with exit code {process.returncode}"
    else:
        outcome.state = f"missed: {', '.join(missed)}" if missed else "ok"


def _lines(process: subprocess.Popen[str], until_s: float) -> Iterator[str | None]:
    """Yield the lines of a process, and None if it is stopped because the time is over."""
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=max(0.0, until_s - time.monotonic()))) is not None:
            yield line
        process.wait()
    except Empty:
        end_group(process, _END_S)
        yield None
    reader.join(_END_S)


_STYLE = """
body { font: 15px system-ui; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .2rem .6rem; vertical-align: top }
tr:not(.result) > th { padding-top: .8rem }
tr.ok > :nth-child(3) { color: #186a3b }
tr.bad > :nth-child(3) { color: #a93226; font-weight: bold }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .5rem }
"""


def page(content: dict[str, Any]) -> str:
    """Return the results as a page that needs no other file."""
    rows = []
    for part in content["parts"]:
        style = "ok" if part["state"] == "ok" else "open" if part["state"].startswith(("not run", "running")) else "bad"
        rows.append(
            f'<tr class="{style}"><th>{html.escape(part["name"])}</th><td>{html.escape(part["question"])}</td>'
            f"<td>{html.escape(part['state'])}</td><td>{part['seconds']:.0f} s</td></tr>"
        )
        for result in part["results"]:
            style = {True: "ok", False: "bad"}.get(result.get("ok"), "")
            cells = [result["name"], value_of(result), result.get("bar", "")]
            columns = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            rows.append(f'<tr class="result {style}"><td></td>{columns}</tr>')
        if part["tail"] and part["state"] != "ok":
            tail = html.escape("\n".join(part["tail"]))
            command = html.escape(part["command"])
            rows.append(f'<tr><td></td><td colspan="3"><pre>{tail}</pre><code>{command}</code></td></tr>')
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>make gpu</title>
<style>{_STYLE}</style>
<h1>Acceptance test of {html.escape(content["host"])}</h1>
<p>{html.escape(content["began"])}; {html.escape(content["device"])}; {content["seconds"]:.0f} s.</p>
<table><tr><th>part</th><th>question or figure</th><th>result</th><th>time or bar</th></tr>
{chr(10).join(rows)}
</table></html>
"""


def value_of(result: dict[str, Any]) -> str:
    """Return the value of a result with its unit."""
    value = result["value"]
    return f"{value:.4g} {result['unit']}" if isinstance(value, float) else f"{value} {result['unit']}".strip()


def facts() -> Iterator[dict[str, Any]]:
    """Yield the machine's facts; uses nothing that is not installed."""
    yield {"name": "python", "value": platform.python_version(), "unit": sys.executable}
    yield {"name": "cores", "value": len(os.sched_getaffinity(0)), "unit": ""}
    queries = {
        "driver": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
    }
    for name, argv in queries.items():
        try:
            out = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            out = f"none ({error})"
        yield {"name": name, "value": out.splitlines()[-1] if name == "nvcc" else out, "unit": ""}
    try:
        import torch
    except ImportError as error:
        yield {"name": "torch", "value": str(error), "unit": "", "ok": False}
        return
    found = torch.cuda.is_available()
    yield {"name": "torch", "value": torch.__version__, "unit": f"CUDA {torch.version.cuda}"}
    yield {"name": "CUDA devices", "value": torch.cuda.device_count(), "unit": "", "bar": ">= 1", "ok": found}
    if found:
        yield {"name": "NCCL", "value": ".".join(map(str, torch.cuda.nccl.version())), "unit": ""}


def main() -> int:
    """Run all parts; return 1 if one is not ok."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kit", type=Path, help="folder of make gpu-kit; without it, make setup installs")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has torch")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of gpu.json and gpu.html")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts (default: 10)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script without a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer steps and smaller models")
    parser.add_argument("--only", nargs="*", metavar="PART", help="run only these parts")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.facts:
        for fact in facts():
            print(RESULT + json.dumps(fact), flush=True)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.venv = options.out.resolve() / "venv" if options.kit else ROOT / ".venv"
    os.environ["PATH"] = f"{options.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"  # as in an activated environment
    return run_all(parts(str(options.venv / "bin" / "python"), options), options)


def run_all(all_parts: list[Part], options: argparse.Namespace) -> int:
    """Run the parts within the time, and save after each result; return 1 if one is not ok."""
    chosen = [part for part in all_parts if not options.only or part.name in options.only]
    outcomes = [Outcome(part.name, part.question, shlex.join(part.argv)) for part in chosen]
    began, at = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S %Z")

    def save() -> None:
        content = {
            "format": 1, "host": platform.node(), "began": at, "device": options.device,
            "seconds": round(time.monotonic() - began, 1), "parts": [asdict(outcome) for outcome in outcomes],
        }  # fmt: skip
        for name, text in (("gpu.json", json.dumps(content, indent=1) + "\n"), ("gpu.html", page(content))):
            new = options.out / f"{name}.new"
            new.write_text(text)
            new.replace(options.out / name)

    for part, outcome in zip(chosen, outcomes, strict=True):
        left_s = began + 60 * options.minutes - time.monotonic()
        if left_s <= 0:
            outcome.state = "not run: no time was left"
        else:
            print(f"{part.name}: {part.question}", flush=True)
            with (options.out / f"{part.name}.log").open("w") as log:
                run_part(part, outcome, min(part.limit_s, left_s), save, log)
            for result in outcome.results:
                bar = f"   ({result['bar']}: {'yes' if result['ok'] else 'NO'})" if result.get("bar") else ""
                print(f"  {result['name']}: {value_of(result)}{bar}")
            for line in outcome.tail if outcome.state != "ok" else []:
                print(f"  | {line}")
            print(f"  {outcome.state} ({outcome.seconds:.0f} s)", flush=True)
        save()
    open_parts = [outcome.name for outcome in outcomes if outcome.state != "ok"]
    print(f"{len(outcomes) - len(open_parts)} of {len(outcomes)} parts ok" + "".join(f"; not {n}" for n in open_parts))
    print(f"results: {options.out / 'gpu.json'}, {options.out / 'gpu.html'}")
    return int(bool(open_parts))


if __name__ == "__main__":
    sys.exit(main())
