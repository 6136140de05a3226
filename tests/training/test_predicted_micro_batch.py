"""The micro-batch that is predicted to fit all ranks of FSDP, which cannot try it out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.comm import torch_group
from hvdtrain.comm.imagined import imagined_ranks
from hvdtrain.config.parse import RunConfig, parse_argv
from hvdtrain.config.schema import Config, MemoryConfig
from hvdtrain.errors import ConfigError
from hvdtrain.fit.memory import predict_memory
from hvdtrain.programs import Finished
from hvdtrain.training.start import predicted_micro_batch
from hvdtrain.training.start.micro_batch import use_found_micro_batch
from hvdtrain.training.start.predicted_micro_batch import predict_largest
from tests.support.stack import STACK, stack
from tests.support.thread_comm import ThreadComm, on_ranks


def _parsed(micro_batch: str) -> RunConfig:
    options = ("--parallel.engine=fsdp", "--train.global_batch=16", f"--train.micro_batch={micro_batch}")
    return parse_argv([*STACK, *options], stack)


def _of_rank(comm: Any, tmp_path: Path, run: Any) -> Any:
    device = SimpleNamespace(type="cpu", index=comm.rank)
    worker = SimpleNamespace(device=device, micro_batch=0, info=SimpleNamespace(folder=Path.cwd()))
    recorder = SimpleNamespace(event=lambda record: None, say=lambda text: None)
    layout = SimpleNamespace(journal=tmp_path / "journal.jsonl")
    return SimpleNamespace(comm=comm, worker=worker, run=run, layout=layout, recorder=recorder)


@pytest.mark.slow
def test_the_rank_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the byte."""
    monkeypatch.setattr(torch_group, "_lasting", {})
    with imagined_ranks(2):
        needed = {size: predict_memory(_parsed(str(size)), stack, 2).peak for size in (4, 8)}
    usable = [needed[8], needed[8] - 1]
    assert needed[4] < usable[1]
    monkeypatch.setattr(predicted_micro_batch, "_usable_bytes", lambda device, limit: usable[device.index])

    def body(comm: ThreadComm) -> Any:
        current = _of_rank(comm, tmp_path, _parsed("auto"))
        use_found_micro_batch(current)
        return current.run.config.train.micro_batch, current.worker.micro_batch

    assert on_ranks(2, body) == [(4, 4)] * 2
    assert not torch.distributed.is_initialized()


def _answers(code: int, line: str, error: str = "") -> Any:
    return lambda *given, **named: Finished(code, line, error)


@pytest.mark.parametrize(
    ("answer", "most", "expected"),
    [
        (_answers(0, '[{"memory": {}, "micro_batch": 8}]'), 16, (8, [1])),
        (_answers(0, '[{"memory": {}, "micro_batch": 8}]'), 4, (4, [])),
        (_answers(1, '[{"memory": {}, "micro_batch": 1}]'), 16, (0, [1])),
        (_answers(1, '[{"memory": null, "refused": "steps depend on values"}]'), 16, "steps depend on values"),
        (_answers(2, "", "a warning\nhvdtrain: TaskError: no function"), 16, "TaskError: no function"),
    ],
)
def test_answers_of_a_prediction(
    answer: Any, most: int, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(predicted_micro_batch, "run_program", answer)
    monkeypatch.setattr(predicted_micro_batch, "_usable_bytes", lambda device, limit: 2 - device.index)

    def body(comm: ThreadComm) -> tuple[int, list[int]]:
        return predict_largest(_of_rank(comm, tmp_path, SimpleNamespace(config=Config(), resolved={})), most)

    if isinstance(expected, tuple):
        assert on_ranks(2, body) == [expected] * 2
    else:
        with pytest.raises(ConfigError, match=expected):
            on_ranks(2, body)


@pytest.mark.parametrize(("limit", "gib"), [(None, 0.9 * 9), (4.0, 0.9 * 4), (99.0, 0.9 * 9)])
def test_what_torch_and_others_hold_is_not_usable(
    limit: float | None, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    device, memory = torch.device("cuda", 0), MemoryConfig(limit=limit)
    assert predicted_micro_batch._usable_bytes(device, memory.limit) == int(gib * 2**30)
