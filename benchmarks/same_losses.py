"""Do two versions of the package train the same bits? Losses and gradient norms of jobs over all engines, meshes,
compressions and ways to exchange, on 1, 2 and 3 ranks, and after a resume.

    python benchmarks/same_losses.py record OLD --source /path/to/the/older/clone
    python benchmarks/same_losses.py record NEW --resumed_from OLD
    python benchmarks/same_losses.py compare OLD NEW

`record` trains 12 steps of each job with the package in `--source` (default: this clone), and writes JSON to a folder.
With `--resumed_from` it resumes the checkpoints of step 6 that the other version has written. `compare` prints how far
each job is apart, and returns 1 if one differs in a bit on 1 or 2 ranks, or by more than 1e-7 on more: there MPI may
sum in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS, HALF = 12, 6
FILE = "losses.json"
TOY = f"--task={ROOT}/tests/support/toy.py:toy"
STACK = f"--task={ROOT}/tests/support/divided_models.py:divided"

JOBS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, (TOY,)),
    "two": (2, (TOY,)),
    "three": (3, (TOY,)),
    "fp16": (2, (TOY, "--parallel.compression=fp16")),
    "int8": (2, (TOY, "--parallel.compression=int8")),
    "topk": (2, (TOY, "--parallel.compression=topk:0.2")),
    "powersgd": (2, (TOY, "--parallel.compression=powersgd:2")),
    "zero1": (2, (TOY, "--parallel.shard=optimizer")),
    "zero2": (2, (TOY, "--parallel.shard=gradients")),
    "zero2_int8": (2, (TOY, "--parallel.shard=gradients", "--parallel.compression=int8")),
    "offload": (2, (TOY, "--parallel.shard=optimizer", "--memory.offload=optimizer")),
    "ddp": (2, (TOY, "--parallel.engine=ddp")),
    "diloco": (2, (TOY, "--parallel.sync=diloco:3", "--parallel.workers=2")),
    "fsdp": (2, (STACK, "--parallel.engine=fsdp")),
    "fsdp_int8": (2, (STACK, "--parallel.engine=fsdp", "--parallel.compression=int8")),
    "fsdp_bf16_weights": (2, (STACK, "--parallel.engine=fsdp", "--precision=bf16-weights")),
    "tp": (2, (STACK, "--parallel.tp=2")),
    "ep": (2, (STACK, "--parallel.ep=2")),
    "cp": (2, (STACK, "--parallel.cp=2")),
    "pp": (2, (STACK, "--parallel.pp=2")),
    "ep_zero1": (2, (STACK, "--parallel.ep=2", "--parallel.shard=optimizer")),
    "groups": (4, (STACK, "--parallel.engine=fsdp", "--parallel.dp_shard=2", "--parallel.compression=int8")),
    "ep_groups": (4, (STACK, "--parallel.engine=fsdp", "--parallel.dp_shard=2", "--parallel.ep=2")),
    "pp_fsdp": (4, (STACK, "--parallel.engine=fsdp", "--parallel.pp=2")),
}
"""Ranks and options; the models are those of the tests of the laws."""


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--source", type=Path, default=ROOT)
    parser.add_argument("--resumed_from", type=Path)
    parser.add_argument("--only", default=",".join(JOBS), help="names of jobs")
    given = parser.parse_args()
    names = given.only.split(",")
    if given.command == "record":
        record(given.folders[0].resolve(), given.source.resolve(), given.resumed_from, names)
        return 0
    return compare(*given.folders, names)


def record(folder: Path, source: Path, resumed_from: Path | None, names: Iterable[str]) -> None:
    """Train each job, and write its losses and norms by step."""
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else {}
    for name in names:
        size, options = JOBS[name]
        run = folder / name
        if resumed_from is not None:
            shutil.copytree(resumed_from.resolve() / name, run, dirs_exist_ok=True)
            for later in (run / "checkpoints").glob(f"step-*{STEPS}"):
                shutil.rmtree(later)
            _train(source, size, (*options, f"--run_dir={run}"))
        else:
            for stop in (HALF, STEPS):
                _train(source, size, (*options, f"--run_dir={run}", f"--train.stop_at={stop}"))
        lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        steps = {
            str(line["step"]): [line["loss"], line.get("grad_norm")]
            for line in lines
            if "loss" in line and "step" in line
        }
        found[name] = {step: values for step, values in steps.items() if "event" not in values}
        (folder / FILE).write_text(json.dumps(found))
        print(f"{name:<18} {size} rank(s)  loss {steps[str(STEPS)][0]:.6f}", flush=True)


def _train(source: Path, size: int, options: tuple[str, ...]) -> None:
    own = ["--train.global_batch=8", "--train.micro_batch=1", f"--train.steps={STEPS}", f"--checkpoint.every={HALF}"]
    own += ["--observe.tensorboard=false", "--observe.timeline=off", "--train.check_every=0", "--parallel.device=cpu"]
    start = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-np", str(size)] if size > 1 else []
    command = [*start, sys.executable, "-m", "hvdtrain", "train", *own, *options]
    environment = {**os.environ, "PYTHONPATH": f"{source}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=source)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def compare(old: Path, new: Path, names: Iterable[str]) -> int:
    """Print which jobs differ; 1 if one differs by more than it may."""
    before, after = (json.loads((folder / FILE).read_text()) for folder in (old, new))
    wrong = []
    for name in names:
        apart = max(
            abs(a - b) / max(abs(a), 1e-30)
            for step in before[name].keys() & after[name].keys()
            for a, b in zip(before[name][step], after[name][step], strict=True)
            if a is not None and b is not None
        )
        may = 0.0 if JOBS[name][0] < 3 else 1e-7
        wrong += [name] if apart > may else []
        print(f"{name:<18} {'the same bits' if not apart else f'apart by {apart:.1e}'}")
    print(f"{len(wrong)} of {len(before)} jobs differ: {', '.join(wrong)}" if wrong else "no job differs")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
