"""One rank of benchmarks/memory.py: trains, and writes RANK.json into the job's folder.

Ours has `watched` as its task; ``python memory_job.py PEER SETTING FILE`` is a peer of engine_loops.py, whose folder is
that of FILE. In the first steps the bytes of `live_bytes.py` are counted, in some later ones the peak resident set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from engine_loops import PEERS, make_given
from jobs import Setting
from live_bytes import LiveBytes
from models import MODELS
from peer_packages import use_packages

import hvdtrain
from hvdtrain import Task
from hvdtrain.runtime.environment import environ, rank_info

COUNTED = 4
"""Steps with counts, from the first one on."""
FIRST, LAST = 8, 14
"""Steps of the peak resident set."""

_OURS = [str(Path(hvdtrain.__file__).parent / part) for part in ("engine/", "exchange/", "comm/", "training/loop/step")]
_TORCH = [str(Path(torch.__file__).parent / part) for part in ("optim/", "distributed/optim/")]


class Watch:
    """Sees the beginning of each step, that of its only forward pass, and measures until the last one."""

    def __init__(self, model: torch.nn.Module, folder: Path, rank: int, code: list[str]) -> None:
        self._counts = LiveBytes(model, [*code, *_TORCH])
        self._file = folder / f"{rank}.json"
        self._step = 0

    def watched(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a loss that is a step's beginning, unless it is one of an evaluation."""

        def call(model: Any, batch: Any) -> Any:
            if torch.is_grad_enabled():
                self._begin(batch)
            return loss(model, batch)

        return call

    def _begin(self, batch: Any) -> None:
        self._step += 1
        if self._step <= COUNTED:
            self._counts.begin(batch)
        elif self._step == COUNTED + 1:
            self._counts.close()
        elif self._step == FIRST:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
        elif self._step == LAST:
            found = {"peaks": [asdict(peak) for peak in self._counts.peaks], "resident_mib": peak_resident_mib()}
            written = self._file.with_suffix(".part")
            written.write_text(json.dumps(found))
            written.rename(self._file)


def peak_resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def watched(folder: str, model: str) -> Task:
    """A task of models.py that is watched.

    Args:
        folder: folder of the result
        model: name of the task
    """
    task = MODELS[model]()
    watch = Watch(task.model, Path(folder), rank_info(environ()).rank, _OURS)
    return replace(task, loss=watch.watched(task.loss))


def main() -> None:
    peer, setting, file = sys.argv[1], Setting(**json.loads(sys.argv[2])), Path(sys.argv[3])
    use_packages()
    rank = int(os.environ["RANK"])
    given = make_given(setting, rank, lambda loss: False)
    code = [f"{folder}/{peer.partition('_')[0]}/runtime/" for folder in sys.path]
    given.loss = Watch(given.model, file.parent, rank, code).watched(given.loss)
    PEERS[peer](given)


if __name__ == "__main__":
    main()
