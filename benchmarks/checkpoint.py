"""What does a checkpoint cost: how long does a step wait, how fast is it on the disk, how fast is it back?

- The wait is held against one copy of as many bytes, in memory that is there already, as the snapshot's is.
- The whole write - tensors, checksums, fsync, manifest, rename - is held against `dd conv=fsync` of as many bytes to
  the same folder, in turns.
- Reading, every byte verified, is held against `torch.load`, torch's distributed checkpoint and bare safetensors: the
  time until every page of every tensor was touched. The files are dropped from the page cache before.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from common import Figure, figure, main, ratios
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.snapshot import Snapshot
from tests.support.checkpoints import save

GB = 1e9
READ = "--read"
PEERS = ("torch", "dcp", "safetensors")


def state(layers: int, make: Callable[..., Tensor] = torch.randn) -> StateDict:
    """A transformer of `layers` layers of width 768 under AdamW: some 85 MB a layer, most tensors small."""
    shapes = {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072)}
    small = {"norm1": (768,), "norm2": (768,), "bias_up": (3072,), "bias_down": (768,)}
    model = {f"layers.{n}.{k}": make(s) for n in range(layers) for k, s in {**shapes, **small}.items()}
    slots = {f"{name}/{slot}": make(w.shape) for name, w in model.items() for slot in ("exp_avg", "exp_avg_sq")}
    steps = {f"{name}/step": torch.tensor(100.0) for name in model}
    return StateDict({"model": model, "optimizer": {**slots, **steps}}, {"progress": {"step": 100}})


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def blocked(full: StateDict, size: int, rounds: int, device: torch.device | str = "cpu") -> dict[str, list[float]]:
    """Seconds of a snapshot of a state on `device` and of a copy of `size` bytes to the host, in turns."""
    on_cuda = torch.device(device).type == "cuda"
    snapshot = Snapshot()
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=on_cuda)
    snapshot.capture(full, 1)
    found: dict[str, list[float]] = {"take": [], "memcpy": []}

    def add(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        if on_cuda:
            torch.cuda.synchronize()
        found[name].append(time.perf_counter() - start)

    for _ in range(rounds):
        add("take", lambda: snapshot.capture(full, 1))
        add("memcpy", lambda: target.copy_(source, non_blocking=True))
    return found


def written(full: StateDict, size: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a whole save and of dd, in turns; each removes what it wrote."""
    store = CheckpointStore(folder / "checkpoints", print)
    blocks = str(-(-size // (1 << 20)))
    command = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={blocks}", "conv=fsync", "status=none"]
    found: dict[str, list[float]] = {"ours": [], "dd": []}
    for number in range(rounds):
        found["ours"].append(seconds(lambda number=number: save(store, number, full)))
        shutil.rmtree(store.directory)
        os.sync()
        found["dd"].append(seconds(lambda: subprocess.run(command, check=True)))
        (folder / "dd").unlink()
        os.sync()
    return found


def flat(full: StateDict) -> dict[str, Tensor]:
    return {f"{group}.{name}": t for group, tensors in full.tensors.items() for name, t in tensors.items()}


def touched(tensors: Mapping[str, Tensor]) -> int:
    """Read a byte of each page."""
    return sum(int(t.reshape(-1).view(torch.uint8)[::4096].sum()) for t in tensors.values() if t.numel())


def save_all(full: StateDict, folder: Path) -> dict[str, Path]:
    """Write the state as each contender does; where."""
    tensors = flat(full)
    ours = save(CheckpointStore(folder / "ours", print), 1, full)
    torch.save(tensors, folder / "state.pt")
    safetensors.torch.save_file(tensors, folder / "state.safetensors")
    dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    return {
        "ours": ours,
        "torch": folder / "state.pt",
        "dcp": folder / "dcp",
        "safetensors": folder / "state.safetensors",
    }


def read(name: str, path: Path, layers: int) -> int:
    """Read all of a state as a contender does."""
    if name == "ours":
        return touched(flat(load(path)))
    if name == "torch":
        return touched(torch.load(path, weights_only=True))
    if name == "safetensors":
        return touched(safetensors.torch.load_file(path))
    empty = {name: torch.empty_like(tensor) for name, tensor in flat(state(layers, torch.zeros)).items()}
    dcp.load(empty, checkpoint_id=path, no_dist=True)
    return touched(empty)


def forget(path: Path) -> None:
    for file in [path] if path.is_file() else path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restored(full: StateDict, layers: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds until all of a state is in memory, in turns; each in a process of its own."""
    found: dict[str, list[float]] = {name: [] for name in ("ours", *PEERS)}
    paths = save_all(full, folder)
    for number in range(rounds):
        # In another order each time: new memory is dear on a virtual machine, and who was before leaves some.
        for name, path in random.Random(number).sample([*paths.items()], len(paths)):
            forget(path)
            command = [sys.executable, __file__, READ, name, str(path), str(layers)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found[name].append(float(done.stdout))
    return found


def measure(quick: bool) -> list[Figure]:
    """All of it, on a state of half a GB, or of one."""
    torch.set_num_threads(1)
    layers = 6 if quick else 12
    full = state(layers)
    size = sum(t.numel() * t.dtype.itemsize for t in flat(full).values())
    rounds = 5 if quick else 15
    copies = blocked(full, size, rounds)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        writes = written(full, size, Path(scratch), rounds)
        reads = restored(full, layers, Path(scratch), 2 if quick else 7)  # starting a process is what takes long
    return [
        figure("checkpoint/bytes", [size / GB], "GB"),
        figure("checkpoint/blocked_ms", [1e3 * s for s in copies["take"]], "ms"),
        figure("checkpoint/memcpy_ms", [1e3 * s for s in copies["memcpy"]], "ms"),
        figure("checkpoint/blocked_vs_memcpy", ratios(copies["take"], copies["memcpy"]), "x"),
        figure("checkpoint/write_gb_per_s", [size / GB / s for s in writes["ours"]], "GB/s"),
        figure("checkpoint/dd_gb_per_s", [size / GB / s for s in writes["dd"]], "GB/s"),
        figure("checkpoint/write_vs_dd", ratios(writes["dd"], writes["ours"]), "x the throughput"),
        figure("checkpoint/restore_gb_per_s", [size / GB / s for s in reads["ours"]], "GB/s"),
        *(
            figure(f"checkpoint/restore_vs_{name}", ratios(reads[name], reads["ours"]), "x the throughput")
            for name in PEERS
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == [READ]:
        torch.set_num_threads(1)
        print(seconds(lambda: read(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        main(__doc__, measure)
