"""Makes the traces of `tests/timeline/traces`: ``python tests/timeline/make_traces.py [NAME ...]``.

Each is what stock Horovod left of a small program of its own users' kind, gzip'd. They are kept in the repository,
since launching them all takes minutes, and what the reader must cope with should not change from run to run.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "traces"
TIMEOUT_S = 100

_BEGIN = "import os, signal, time, torch, horovod.torch as hvd\nhvd.init()\ntorch.manual_seed(0)\n"
_END = "\ntime.sleep(0.3)  # Horovod's shutdown does not wait for what its writer has still to write\nhvd.shutdown()\n"

_TRAINING = """
layers = []
for _ in range(3):
    layers += [torch.nn.Linear(8, 8), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers)
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
_COLLECTIVES = """
n, r = hvd.size(), hvd.rank()
for _ in range(2):
    hvd.allgather(torch.ones(r + 1, 3), name="gathered")
    hvd.broadcast(torch.ones(4, dtype=torch.float64), 0, name="cast")
    hvd.alltoall(torch.ones(2 * n, dtype=torch.int32), name="exchanged")
    hvd.reducescatter(torch.ones(2 * n, 2), name="scattered", op=hvd.Sum)
    hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.float16)], name="together")
    hvd.allreduce(torch.ones(()), name="scalar")
    hvd.allreduce(torch.ones(3))
    hvd.broadcast_object({"a": 1}, name="object")
    hvd.barrier()
"""
_WINDOWS = """
for step in range(9):
    if step in (2, 6) and hvd.rank() == 0:
        hvd.start_timeline(os.environ["WINDOW"].replace(".json", f"-{step}.json"), mark_cycles=step == 6)
    for name in ("a", "b"):
        hvd.allreduce(torch.ones(4), name=name)
    if step in (4, 8) and hvd.rank() == 0:
        hvd.stop_timeline()
"""
_KILLED = """
for step in range(1000):
    hvd.allreduce(torch.ones(64), name=f"gradient.{step % 20}")
    if step == 60 and hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""
_NAMES = """
for _ in range(2):
    for name in (
        'say "hi"', "back\\\\slash", "two\\nlines", "\\x01\\x1f control", "Gewicht.für.Größe.重み", "",
        "DistributedAdam_Allreduce/cond_12/HorovodAllreduce_grads_3_0", "a, b: [c] {d}", 'x"}},',
        '{"ph": "E", "ts": 1, "pid": 1}', "n" * 3000,
    ):
        hvd.allreduce(torch.ones(2), name=name)
"""


KINDS: dict[str, tuple[str, int, dict[str, str]]] = {
    "training": (_TRAINING, 2, {}),
    "training-4-ranks-gloo": (_TRAINING, 4, {}),
    "ticks-4-ranks": (_TRAINING, 4, {"HOROVOD_CACHE_CAPACITY": "0"}),
    "cycles": (_TRAINING, 2, {"HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_CYCLE_TIME": "20"}),
    "collectives": (_COLLECTIVES, 2, {}),
    "window": (_WINDOWS, 2, {"HOROVOD_TIMELINE": "DYNAMIC"}),
    "killed": (_KILLED, 2, {}),
    "names": (_NAMES, 2, {}),
}
"""Program, number of ranks, and variables."""


def make(name: str) -> None:
    """Run one kind and keep what it left."""
    program, size, more = KINDS[name]
    launcher = ["horovodrun", "--gloo"] if name.endswith("gloo") else ["mpirun", "--oversubscribe"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trace = folder / f"{name}.json"
        (folder / "program.py").write_text(_BEGIN + program + _END)
        variables = {"HOROVOD_TIMELINE": str(trace), "WINDOW": str(trace), "OMP_NUM_THREADS": "1", **more}
        done = subprocess.run(
            [*launcher, "-np", str(size), sys.executable, str(folder / "program.py")],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        found = sorted(folder.glob("*.json"))
        if not found or (done.returncode and name != "killed"):
            raise SystemExit(f"{name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        for file in found:
            (FOLDER / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or KINDS:
        make(chosen)
