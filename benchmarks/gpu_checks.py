"""The parts of `gpu.py` that need hvdtrain installed: ``python gpu_checks.py --device cuda NAME``.

Each prints a line for each result as it comes. With ``--device cpu`` the same code runs on small sizes without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ratios
from gpu import RESULT

from hvdtrain.observe.past_journal import read_steps
from hvdtrain.spans import JOURNAL_KEYS
from tests.support.journals import read_journal

ROOT = Path(__file__).resolve().parents[1]
ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Check:
    """What a check knows: the device type, whether to be quick, and a folder for its runs."""

    device: str
    quick: bool
    folder: Path

    def emit(self, name: str, value: object, unit: str = "", bar: str = "", *, ok: bool | None = None) -> None:
        """Print a result. `bar`: what is expected; `ok`: whether the value is that."""
        result = {"name": name, "value": value, "unit": unit, "bar": bar, "ok": ok}
        print(RESULT + json.dumps(result), flush=True)

    def job(self, name: str, *options: str, size: int = 1, device: str = "", launch: Sequence[str] = ()) -> list[float]:
        """Run the main job on `size` ranks; return its losses by step."""
        run = self.folder / name
        start = launch or [*_mpirun(size), *_PROGRAM]
        argv = [*start, *self.options(), f"--run_dir={run}", f"--parallel.device={device or self.device}", *options]
        subprocess.run(argv, check=True, env={**os.environ, **ROOT_ALLOWED}, cwd=ROOT)
        return [line["loss"] for line in read_steps(run / "journal.jsonl").values()]

    def options(self) -> list[str]:
        """Return the options of all jobs."""
        model = ["--model.preset=tiny", "--data.seq_len=32"] if self.device == "cpu" else []
        return ["--seed=0", "--train.eval_samples=8", *model]

    @property
    def shared(self) -> str:
        """How two ranks use the device."""
        return "shared" if self.device == "cuda" else self.device


_PROGRAM = (sys.executable, "-m", "hvdtrain")
_LAUNCH = (*_PROGRAM, "launch", "--to", "hvdtrain", "-np", "2")


def _mpirun(size: int) -> list[str]:
    if size == 1:
        return []
    return ["mpirun", "-np", str(size), "--oversubscribe", "--bind-to", "none"]


def _worst(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) > 0, f"{len(found)} and {len(expected)} steps"
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _compare(check: Check, what: str, found: Sequence[float], expected: Sequence[float]) -> None:
    """Compare losses by step: closely in the first steps, and less so in all.

    Where a router finds two experts equally good but for rounding, other kernels choose the other one. One token of one
    step that goes to another expert changes the losses of the default model by 1e-5 some steps later, and by 1e-3 after
    12 steps.
    """
    for steps, bar in ((2, 1e-5), (len(expected), 1e-2)):
        worst = _worst(found[:steps], expected[:steps])
        name, good = f"losses of {steps} steps, {what}", worst <= bar
        check.emit(name, worst, "largest relative difference", f"<= {bar:g}", ok=good)
    print(what, found, expected)


def train(check: Check) -> None:
    """Compare one rank's losses with the CPU's."""
    steps = f"--train.steps={4 if check.quick else 12}"
    found, expected = check.job("device", steps), check.job("cpu", steps, device="cpu")
    check.emit("last loss", found[-1], "nats a token")
    _compare(check, "device and CPU", found, expected)


_MODES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16 weights": {"precision": "bf16-weights"},
    "fp16": {"precision": "fp16"},
    "compiled": {"precision": "bf16", "train": {"compile": True}},
    "recomputed": {"memory": {"checkpointing": "full"}},
    "Muon": {"optimizer": {"name": "muon"}},
    "TF32": {"train": {"tf32": "on"}},
    "average": {"train": {"ema": 0.9}},
}
"""Options by what they choose."""


def modes(check: Check) -> None:
    """Train with the default options, and with others: the held-out loss is about the same."""
    import hvdtrain

    steps = 10 if check.quick else 60
    small = {"model": {"preset": "tiny"}, "seq_len": 32} if check.device == "cpu" else {"model": {}, "seq_len": 128}
    first = 0.0
    for name, mode in {"default": {}, **_MODES}.items():
        train = {"steps": steps, "eval_samples": 64, **mode.get("train", {})}
        options = {"run_dir": str(check.folder / name), "parallel": {"device": check.device}, **mode, "train": train}
        result = hvdtrain.train({"checkpoint": {"every": 0}, **options}, _task(small))
        loss = result.last_heldout_loss
        first = first or loss
        check.emit(f"{name}: tokens", result.tokens_per_s, "a second")
        near = abs(loss - first) <= (0.5 if name == "Muon" else 0.05) * first
        check.emit(f"{name}: held-out loss", loss, "nats a token", f"near {first:.3f}", ok=near)


def share(check: Check) -> None:
    """Compare the losses of two ranks that share the device with those of one."""
    steps = f"--train.steps={4 if check.quick else 12}"
    one = check.job("one", steps)
    ways: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "MPI": ((), ()),
        "Gloo": ((*_LAUNCH, "--"), ()),
        "ZeRO": ((), ["--parallel.shard=gradients"]),
        "DDP": ((), ["--parallel.engine=ddp"]),
        "FSDP": ((), ["--parallel.engine=fsdp"]),
        "parts of sequences": ((), ["--parallel.cp=2"]),
        "stages": ((), ["--parallel.pp=2"]),
    }
    for name, (launch, options) in ways.items():
        run = f"two-{name.replace(' ', '_')}"
        try:
            found = check.job(run, steps, *options, size=2, device=check.shared, launch=launch)
        except subprocess.CalledProcessError as error:
            check.emit(f"losses, 2 ranks by {name} and 1", f"exit code {error.returncode}", "", "0", ok=False)
            continue
        _compare(check, f"2 ranks by {name} and 1", found, one)


def resume(check: Check) -> None:
    """Compare a resumed run with an uninterrupted one."""
    options = ("--train.steps=8", "--checkpoint.every=4", "--train.deterministic=true")
    whole = check.job("whole", *options)
    check.job("parts", *options, "--train.stop_at=4")
    parts = check.job("parts", *options)
    check.emit("losses of 8 steps and of 4 + 4", parts == whole, "", "equal bit for bit", ok=parts == whole)


def kill(check: Check) -> None:
    """Kill one of two ranks; the other goes on, and the losses stay those of one rank."""
    steps = f"--train.steps={40 if check.quick else 100}"
    events, run = check.folder / "events", check.folder / "killed"
    options = [*check.options(), steps, f"--run_dir={run}", f"--parallel.device={check.shared}"]
    job = subprocess.Popen([*_LAUNCH, "--elastic", "1:2", "--events", str(events), "--", *options], cwd=ROOT)
    try:
        until_s = time.monotonic() + 60
        while not (run / "journal.jsonl").exists() or len(read_steps(run / "journal.jsonl")) < 10:
            assert time.monotonic() < until_s and job.poll() is None, "the job has done no 10 steps"
            time.sleep(0.1)
        victim = next(pid for pid in _ranks_of(job.pid) if _environment(pid).get("HOROVOD_RANK") != "0")
        os.kill(victim, signal.SIGKILL)
        code = job.wait()
    finally:
        job.kill()
    check.emit("exit code of the job", code, "", "0", ok=code == 0)
    found = [line["loss"] for line in read_steps(run / "journal.jsonl").values()]
    worst = _worst(found, check.job("alone", steps))
    check.emit("losses, killed and uninterrupted", worst, "largest relative difference", "<= 1e-3", ok=worst <= 1e-3)


def _ranks_of(pid: int) -> Iterator[int]:
    import psutil

    for process in psutil.Process(pid).children(recursive=True):
        if "hvdtrain" in process.cmdline() and "launch" not in process.cmdline():
            yield process.pid


def _environment(pid: int) -> dict[str, str]:
    import psutil

    return psutil.Process(pid).environ()


def memory(check: Check) -> None:
    """Run out of the device's memory: the job fails with a card that says whose memory it is."""
    if check.device != "cuda":
        check.emit("card", "not tried: no device", "")
        return
    batch = 1 << 20
    options = [f"--train.global_batch={batch}", f"--train.micro_batch={batch // 4}", "--train.steps=1"]
    argv = [*_PROGRAM, *check.options(), *options, f"--run_dir={check.folder / 'run'}", "--parallel.device=cuda"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    print(done.stderr[-3000:])
    names = "out of memory" in done.stderr and "on the GPU" in done.stderr
    check.emit("exit code", done.returncode, "", "not 0", ok=done.returncode != 0)
    check.emit("the card says where memory went", names, "", "yes", ok=names)


_SENSORS = ("gpu_percent", "gpu_clock_mhz", "gpu_temperature_c", "gpu_power_w", "cuda_allocated_peak_bytes")


def observe(check: Check) -> None:
    """Check what a job records of its device, and count how often the host waits for it."""
    on_gpu = check.device == "cuda"
    check.job("observed", "--train.steps=30", *(["--observe.nvtx=true"] if on_gpu else []))
    journal = check.folder / "observed" / "journal.jsonl"
    steps = list(read_steps(journal).values())[10:]
    parts = sum(step[part] for step in steps[1:] for part in JOURNAL_KEYS.values())
    share = parts / (steps[-1]["time"] - steps[0]["time"])
    check.emit("parts of steps / wall time", share, "ratio", "0.9 to 1.02", ok=0.9 <= share <= 1.02)
    if not on_gpu:
        check.emit("sensors and waits", "not tried: no device")
        return
    sampled = {key for line in read_journal(journal) if line.get("event") == "machine" for key in line}
    missing = [name for name in _SENSORS if name not in sampled]
    check.emit("sensors without a value", ", ".join(missing) or "none", "", "none", ok=not missing)
    waits = (_waits(check, 30) - _waits(check, 10)) / 20
    # The model's mask of transformers makes the host wait once a micro-batch (find_packed_sequence_indices).
    check.emit("operations that make the host wait", waits, "a step of 4 micro-batches", "<= 4", ok=waits <= 4.5)


def _waits(check: Check, steps: int) -> int:
    """Return how many operations of a job of `steps` steps made the host wait for the device."""
    import hvdtrain

    options = {
        "run_dir": str(check.folder / f"waits-{steps}"), "parallel": {"device": "cuda"}, "checkpoint": {"every": 0},
        "train": {"steps": steps, "eval_samples": 8}, "precision": "bf16",
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            hvdtrain.train(options, _task({"model": {"preset": "small"}, "seq_len": 128}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    for (path, line), count in Counter((warning.filename, warning.lineno) for warning in found).most_common(5):
        print(f"{count} waits at {path}:{line}")
    return len(found)


def overhead(check: Check) -> None:
    """Ours beside a loop written by hand, in turns: the default model and a Llama, eager and compiled."""
    for name, sizes in _models(check).items():
        for compiled in (False, True) if check.device == "cuda" else (False,):
            compared, speeds, utilisation = [], [], None
            for _ in range(2 if check.quick else 3):
                gc.collect()  # of what earlier rounds have left; it would stop one of the loops for 0.3 s
                ours_s, facts = _ours(check, sizes, compiled=compiled)
                theirs_s = _by_hand(check, sizes, compiled=compiled)
                compared.append(ours_s / theirs_s)
                speeds.append(sizes["micro_batch"] * sizes["seq_len"] / ours_s)
                if facts.get("peak_per_s"):
                    utilisation = facts["per_sample"] * sizes["micro_batch"] / min(ours_s, 1e9) / facts["peak_per_s"]
            label = f"{name}, {'compiled' if compiled else 'eager'}"
            ratio = statistics.median(compared)
            check.emit(f"{label}: step / bare loop", ratio, "ratio", "<= 1.01", ok=ratio <= 1.01)
            check.emit(f"{label}: tokens", statistics.median(speeds), "a second")
            if utilisation is not None:
                check.emit(f"{label}: bf16 MFU", 100 * utilisation, "% of the data sheet's peak")


def _models(check: Check) -> dict[str, dict[str, Any]]:
    if check.device == "cpu":
        return {"tiny": {"model": {"preset": "tiny"}, "seq_len": 32, "micro_batch": 4, "steps": 8}}
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
        "vocab_size": 8192, "use_cache": False,
    }  # fmt: skip
    config = check.folder / "llama.json"
    config.write_text(json.dumps(llama))
    steps = 20 if check.quick else 40
    return {
        "DeepSeek-style 7M": {"model": {"preset": "small"}, "seq_len": 512, "micro_batch": 64, "steps": steps},
        "Llama 1B": {"model": {"config": str(config)}, "seq_len": 1024, "micro_batch": 16, "steps": steps},
    }


def _task(sizes: dict[str, Any]) -> Any:
    from hvdtrain.task.language_model import ModelConfig, language_model
    from hvdtrain.task.text_config import TextConfig

    torch.manual_seed(0)
    return language_model(ModelConfig(**sizes["model"]), TextConfig(seq_len=sizes["seq_len"]))


_WARM_UP = 4


def _ours(check: Check, sizes: dict[str, Any], *, compiled: bool) -> tuple[float, dict[str, Any]]:
    """Seconds of a step, and the event ``flops``."""
    import hvdtrain

    with tempfile.TemporaryDirectory(dir=check.folder) as run:
        batch = {"global_batch": sizes["micro_batch"], "micro_batch": sizes["micro_batch"]}
        options = {
            "run_dir": run, "precision": "bf16", "checkpoint": {"every": 0},
            "train": {"steps": sizes["steps"], "eval_samples": 8, "compile": compiled, **batch},
            "parallel": {"device": check.device},
        }  # fmt: skip
        hvdtrain.train(options, _task(sizes))
        times = [line["time"] for line in read_steps(Path(run) / "journal.jsonl").values()]
        lines = read_journal(Path(run) / "journal.jsonl")
        facts = next((line for line in lines if line.get("event") == "flops"), {})
    torch._dynamo.reset()
    return (times[-1] - times[_WARM_UP]) / (len(times) - 1 - _WARM_UP), facts


def _by_hand(check: Check, sizes: dict[str, Any], *, compiled: bool) -> float:
    """Seconds of a step of a loop with the same model, batch, precision, clipping and fused AdamW."""
    from peer_loops import batches

    from hvdtrain.training.loop.forward import autocast_experts

    task, device = _task(sizes), torch.device(check.device)
    model = task.model.to(device)
    autocast_experts(model)
    if compiled:
        for block in model.model.layers:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    source = batches(task, sizes["micro_batch"], 0, pin_memory=device.type == "cuda")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for step in range(sizes["steps"]):
        if step == _WARM_UP + 1:
            wait()
            began = time.perf_counter()
        optimizer.zero_grad()
        batch = next(source).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss, weight = task.loss(model, batch)
        (loss / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    wait()
    torch._dynamo.reset()
    return (time.perf_counter() - began) / (sizes["steps"] - _WARM_UP - 1)


_LINK_GBPS = 12.5
"""A link of 100 Gbit/s. A compression that is slower than the link cannot shorten an exchange."""


def compressors(check: Check) -> None:
    """Each compressor beside a copy of the same gradients, and beside a link of 100 Gbit/s."""
    from compressors import speed

    for figure in speed(torch.device(check.device), check.quick):
        bar = {"bar": f">= {_LINK_GBPS}", "ok": figure.value >= _LINK_GBPS} if figure.unit == "GB/s" else {}
        check.emit(figure.name, figure.value, figure.unit, **bar)  # type: ignore[arg-type]


def kernels(check: Check) -> None:
    """Count the operations of an exchange on 2 and on 8 ranks, which are threads of this process."""
    from hvdtrain.compression.table import TABLE, parse
    from tests.support.compression import bucket, operations

    with torch.device(check.device):
        for name in TABLE:
            few, many = (operations(parse(name), bucket(((400, 300), (7,))), size) for size in (2, 8))
            check.emit(f"{name}: operations at 8 ranks / at 2", many / few, "ratio", "<= 1.1", ok=many <= 1.1 * few)


def checkpoint(check: Check) -> None:
    """How long a snapshot stops the steps, beside one copy of as many bytes to the host."""
    from checkpoint import blocked

    from hvdtrain.state.pieces import StateDict

    size = (1 << 22) if check.device == "cpu" else (1 << 30)
    tensors = {str(n): torch.ones(size // 64 // 4, device=check.device) for n in range(64)}
    found = blocked(StateDict({"model": tensors}, {}), size, 5 if check.quick else 10, check.device)
    ratio = statistics.median(ratios(found["take"], found["memcpy"]))
    check.emit("state", size / 2**30, "GiB")
    check.emit("snapshot / copy of as many bytes", ratio, "ratio", "<= 1.2", ok=ratio <= 1.2)


CHECKS: dict[str, Callable[[Check], None]] = {
    check.__name__: check
    for check in (train, modes, share, resume, kill, memory, observe, overhead, compressors, kernels, checkpoint)
}


def main() -> None:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[options.name](Check(options.device, options.quick, Path(folder)))


if __name__ == "__main__":
    main()
