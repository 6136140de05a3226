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
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_SPARSE = """
model = torch.nn.EmbeddingBag(16, 4, sparse=True, mode="sum")
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.tensor([[1, 2], [3, hvd.rank()]])).sum().backward()
    optimizer.step()
"""
_SETS = """
even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])
hvd.add_process_set(even)
hvd.add_process_set(odd)
mine = even if hvd.rank() % 2 == 0 else odd
for _ in range(3):
    hvd.allreduce(torch.ones(5), name=f"of.{hvd.rank() % 2}", process_set=mine)
    hvd.allreduce(torch.ones(2), name="of.all")
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
_ELASTIC = """
import horovod.torch.elastic
state = hvd.elastic.TorchState(model=torch.nn.Linear(2, 2), step=0)

@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        hvd.start_timeline(os.environ["WINDOW"].replace(".json", f"-{state.step}.json"))
    while state.step < 12:
        hvd.allreduce(torch.ones(3), name="gradient")
        state.step += 1
        if state.step == 6:
            state.commit()
            time.sleep(0.2)
            if hvd.rank() == 1 and hvd.size() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 0:
        time.sleep(0.2)
        hvd.stop_timeline()

train(state)
"""


@dataclass(frozen=True)
class Kind:
    """A program and how it is started."""

    program: str
    size: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "mpirun"
    may_fail: bool = False


KINDS = {
    "training": Kind(_TRAINING),
    "training-4-ranks-gloo": Kind(_TRAINING, 4, launcher="gloo"),
    "ticks-4-ranks": Kind(_TRAINING, 4, {"HOROVOD_CACHE_CAPACITY": "0"}),
    "cycles": Kind(_TRAINING, variables={"HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_CYCLE_TIME": "20"}),
    "collectives": Kind(_COLLECTIVES),
    "collectives-gloo": Kind(_COLLECTIVES, launcher="gloo"),
    "sparse": Kind(_SPARSE),
    "process-sets-4-ranks": Kind(_SETS, 4, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}),
    "window": Kind(_WINDOWS, variables={"HOROVOD_TIMELINE": "DYNAMIC"}),
    "killed": Kind(_KILLED, may_fail=True),
    "names": Kind(_NAMES),
    "elastic": Kind(_ELASTIC, variables={"HOROVOD_TIMELINE": "DYNAMIC"}, launcher="elastic", may_fail=True),
}


def _launcher(kind: Kind, folder: Path) -> list[str]:
    if kind.launcher == "mpirun":
        return ["mpirun", "-np", str(kind.size), "--oversubscribe"]
    hosts = f"localhost:{kind.size}"
    if kind.launcher == "gloo":
        return ["horovodrun", "--gloo", "-np", str(kind.size), "-H", hosts]
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    script.chmod(0o755)
    elastic = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    return ["horovodrun", "--gloo", "-np", "2", *elastic, "--network-interface", "lo"]


def make(name: str) -> None:
    """Run one kind and keep what it left."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trace = folder / f"{name}.json"
        (folder / "program.py").write_text(_BEGIN + kind.program + _END)
        variables = {"HOROVOD_TIMELINE": str(trace), "WINDOW": str(trace), "OMP_NUM_THREADS": "1", **kind.variables}
        done = subprocess.run(
            [*_launcher(kind, folder), sys.executable, str(folder / "program.py")],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        found = sorted(folder.glob("*.json"))
        if not found or (done.returncode and not kind.may_fail):
            raise SystemExit(f"{name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        for file in found:
            packed = FOLDER / f"{file.name}.gz"
            packed.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
            sys.stdout.write(f"{packed.name}: {packed.stat().st_size} bytes of {file.stat().st_size}\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or KINDS:
        make(chosen)
