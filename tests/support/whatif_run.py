"""A made-up run folder, for tests of predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

MIB = 1 << 20
GBIT = [(1024, 1e-4), (MIB, 0.0091), (8 * MIB, 0.0711)]
"""What a probe of a link of about 1 Gbit/s took."""
SHAPES = {"a": (1024, 512), "b": (1024, 512), "c": (512,), "d": (1024, 1024)}
"""2, 2, 0 and 4 MiB; backward has them in the reverse order, 20, 40, 60 and 80 ms after it began."""
PARTS = {"data": 5.0, "copy": 1.0, "forward": 50.0, "backward": 100.0}
PARTS |= {"exposed_comm": 0.0, "clip": 2.0, "optimizer": 8.0}
"""Milliseconds of a step."""


def run_folder(
    path: Path,
    *,
    size: int = 1,
    local_size: int = 1,
    cores: int = 8,
    own_cores: int = 0,
    wait_ms: float = 0.0,
    gather_ms: float = 0.0,
    steps: int = 30,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    link: Sequence[tuple[int, float]] = (),
    passes: int = 1,
    late_ms: float = 0.0,
    late_in: str = "",
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    state_bytes: tuple[float, float] | None = None,
    copies: Mapping[str, int] | None = None,
    copied: tuple[int, float] | None = None,
) -> Path:
    """Write config, journal, gradients, and where there is a link or a late last rank, every rank's stamps.

    The last rank is late in the part `late_in`.
    """
    (path / "timeline").mkdir(parents=True)
    config: dict[str, Any] = {
        "task": "language_model",
        "parallel": {"compression": "none"},
        "train": {"global_batch": 4 * size * passes, "micro_batch": 4},
    }
    for section, given in (options or {}).items():
        config[section] = {**config[section], **given}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    parts = {**PARTS, "exposed_comm": wait_ms, "gather": gather_ms}
    whole = sum(parts.values())
    lines: list[dict[str, Any]] = [{"event": "started", "size": size}]
    lines += [
        {"step": number, **{f"{name}_s": ms / 1e3 for name, ms in parts.items()}, "step_s": whole / 1e3}
        for number in range(1, steps + 1)
    ]
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ready_us = [20e3 * (len(shapes) - place) / passes for place in range(len(shapes))]
    step = {"step": 4, "passes": passes, "backward_us": 100e3 / passes, "ready_us": ready_us, "packed_us": ready_us}
    gradients = {
        **{"version": 1, "size": size, "local_size": local_size, "cores": cores, "own_cores": own_cores or cores},
        **{"threads": 1, "device": "cpu", "compression": "none", "plan": None, "exchange_cpu_us": None},
        "copied": copied,
        "parameters": [
            {"name": name, "shape": list(shape), "dtype": "float32", "rows": None, "state_bytes": state_bytes,
             "copies": (copies or {}).get(name, size)}
            for name, shape in shapes.items()
        ],
        "steps": [step],
    }  # fmt: skip
    (path / "timeline" / "gradients.json").write_text(json.dumps(gradients))
    if link or late_ms:
        clock = {"offset_us": [0.0] * size, "error_us": [0.0] * size}
        start = {"version": 1, "event": "start", "start": 0, "size": size, "hosts": ["h"] * size, "at_step": 0}
        start |= {"clock_ids": ["x"] * size, "origin_us": 0.0, "link": link, "clock": clock}
        block = {**_block(size, steps, whole, wait_ms, late_ms), "clock": clock}
        own_us = [[1e3 * (PARTS.get(late_in, 0.0) + late_ms * (rank == size - 1))] * steps for rank in range(size)]
        stamps = [start, {**block, "parts_us": {late_in: own_us} if late_in else {}}]
        (path / "timeline" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stamps))
    return path


def _block(size: int, steps: int, step_ms: float, wait_ms: float, late_ms: float) -> dict[str, Any]:
    """Stamps of all steps; the last rank is ready later than the others."""
    begins = [1e3 * step_ms * number for number in range(steps)]
    ready_ms = [step_ms - wait_ms - 10.0 + late_ms * (rank == size - 1) for rank in range(size)]
    return {
        "event": "block",
        "first_step": 1,
        "start_us": [begins] * size,
        "ready_us": [[us + 1e3 * ready for us in begins] for ready in ready_ms],
        "released_us": [[us + 1e3 * (step_ms - 10.0) for us in begins]] * size,
        "end_us": [[us + 1e3 * step_ms for us in begins]] * size,
        "parts_us": {},
        "facts": {},
    }
