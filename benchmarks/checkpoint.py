"""What does a checkpoint cost: how long does a step wait, how fast is it on the disk, how fast is it back?

- The wait is held against one copy of as many bytes, in memory that is there already, as the snapshot's is.
- The whole write - tensors, checksums, fsync, manifest, rename - is held against `dd conv=fsync` of as many bytes to
  the same folder, in turns.
- Reading, every byte verified, is held against `torch.load`, torch's distributed checkpoint and bare safetensors: the
  time until every page of every tensor was touched. The files are dropped from the page cache before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from common import Figure, figure, main, ratios
from torch import Tensor

from hvdtrain.state.snapshot import Snapshot
from hvdtrain.state.store import CheckpointStore, load
from hvdtrain.state.train_state import StateDict

GB = 1e9
PEERS = ("torch", "dcp", "safetensors")


def state(layers: int) -> StateDict:
    """A transformer of `layers` layers of width 768 under AdamW: some 85 MB a layer, most tensors small."""
    shapes = {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072)}
    small = {"norm1": (768,), "norm2": (768,), "bias_up": (3072,), "bias_down": (768,)}
    model = {f"layers.{n}.{k}": torch.randn(s) for n in range(layers) for k, s in {**shapes, **small}.items()}
    slots = {f"{name}/{slot}": torch.randn_like(w) for name, w in model.items() for slot in ("exp_avg", "exp_avg_sq")}
    steps = {f"{name}/step": torch.tensor(100.0) for name in model}
    return StateDict({"model": model, "optimizer": {**slots, **steps}}, {"progress": {"step": 100}})


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def blocked(full: StateDict, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a snapshot and of a copy, in turns."""
    snapshot = Snapshot()
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    snapshot.take(full, 1)
    found: dict[str, list[float]] = {"take": [], "memcpy": []}
    for number in range(rounds):
        found["take"].append(seconds(lambda: snapshot.take(full, 1)))
        found["memcpy"].append(seconds(lambda: target.copy_(source)))
        assert snapshot.step == 1 and number >= 0
    return found


def written(full: StateDict, size: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a whole save and of dd, in turns; each removes what it wrote."""
    store = CheckpointStore(folder / "checkpoints", print)
    blocks = str(-(-size // (1 << 20)))
    command = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={blocks}", "conv=fsync", "status=none"]
    found: dict[str, list[float]] = {"ours": [], "dd": []}
    for number in range(rounds):
        found["ours"].append(seconds(lambda number=number: store.save(number, full, {})))
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


def restorers(full: StateDict, folder: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """By name: what was written, and what reads it."""
    tensors = flat(full)
    ours = CheckpointStore(folder / "ours", print).save(1, full, {})
    torch.save(tensors, folder / "state.pt")
    safetensors.torch.save_file(tensors, folder / "state.safetensors")
    dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)

    def by_dcp() -> int:
        empty = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        dcp.load(empty, checkpoint_id=folder / "dcp", no_dist=True)
        return touched(empty)

    return {
        "ours": (ours, lambda: touched(flat(load(ours)))),
        "torch": (folder / "state.pt", lambda: touched(torch.load(folder / "state.pt", weights_only=True))),
        "dcp": (folder / "dcp", by_dcp),
        "safetensors": (
            folder / "state.safetensors",
            lambda: touched(safetensors.torch.load_file(folder / "state.safetensors")),
        ),
    }


def forget(path: Path) -> None:
    """Drop files from the page cache."""
    for file in [path] if path.is_file() else path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restored(full: StateDict, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds until all of a state is in memory, in turns."""
    found: dict[str, list[float]] = {name: [] for name in ("ours", *PEERS)}
    contenders = restorers(full, folder)
    for _ in range(rounds):
        for name, (path, read) in contenders.items():
            forget(path)
            found[name].append(seconds(read))
    return found


def measure(quick: bool) -> list[Figure]:
    """All of it, on a state of half a GB, or of one."""
    torch.set_num_threads(1)
    full = state(6 if quick else 12)
    size = sum(t.numel() * t.dtype.itemsize for t in flat(full).values())
    rounds = 5 if quick else 15
    copies = blocked(full, size, rounds)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        writes = written(full, size, Path(scratch), rounds)
        reads = restored(full, Path(scratch), rounds)
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
    main(__doc__, measure)
