"""A checkpoint that all ranks read together: each its part, and all agree on whether it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.state import read_together
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.stored_file import StoredFile
from tests.laws.test_laws import check_same, record
from tests.support.gallery import Recorded
from tests.support.stack import STACK

PARTS = (*STACK, "--checkpoint.every=2", "--checkpoint.keep=9", "--method=adamw", "--dropout=0")


def _stopped(folder: Path, *options: str, size: int) -> Recorded:
    return record(folder, *PARTS, "--train.stop_at=4", *options, size=size)


def _optimizer(folder: Path) -> Path:
    (newest,) = [each.path for each in CheckpointStore(folder / "run/checkpoints", print).list() if each.step == 4]
    return newest / "optimizer.safetensors"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has many blocks, however small it is."""
    for module in ("stored_file", "tensor_file"):
        monkeypatch.setattr(f"hvdtrain.state.{module}.CHECKED_BYTES", 64)


@pytest.mark.parametrize(("before", "size"), [(3, 3), (3, 2), (2, 4)])
def test_ranks_read_no_more_than_they_hold(
    before: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = "--parallel.shard=optimizer"
    expected = record(tmp_path / "other", *PARTS, shard, size=size)
    _stopped(tmp_path, shard, size=before)
    read, of_file = list[int](), StoredFile.read

    def reading(file: StoredFile, begin: int, end: int) -> Any:
        if file.path == path:
            read.append(end - begin)
        return of_file(file, begin, end)

    path = _optimizer(tmp_path)
    monkeypatch.setattr(StoredFile, "read", reading)
    found = record(tmp_path, *PARTS, shard, size=size)
    assert found.losses() == pytest.approx(expected.losses(), rel=1e-5)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    # Each part once to verify it, and that of rank 0 once more to load it; parts are not of equal size.
    assert 0 < sum(read) - header <= (len(content) - header) * (1 + 1 / size) * 1.2


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_damage_that_another_rank_finds_ends_no_run(shard: str, tmp_path: Path) -> None:
    _stopped(tmp_path / "whole", f"--parallel.shard={shard}", size=3)
    header = 8 + int.from_bytes(_optimizer(tmp_path / "whole").read_bytes()[:8], "little")
    found_by = set()
    for place in range(4):
        shutil.copytree(tmp_path / "whole", tmp_path / str(place))
        path = _optimizer(tmp_path / str(place))
        content = bytearray(path.read_bytes())
        content[header + (2 * place + 1) * (len(content) - header) // 8] ^= 4
        path.write_bytes(content)
        found = record(tmp_path / str(place), *PARTS, f"--parallel.shard={shard}", size=3)
        assert [event["step"] for event in found.events("resumed")] == [2]
        (text,) = [each["text"] for each in found.events("warning") if "is damaged at byte" in each["text"]]
        found_by.add(text.rpartition("(on rank ")[2])
    assert found_by == {"0)", "1)", "2)"}, "each reads what it holds"


def test_an_error_of_the_search_is_one_of_all_ranks(tmp_path: Path) -> None:
    record(tmp_path, *PARTS, size=2)
    with pytest.raises(ConfigError, match="no checkpoint"):
        record(tmp_path / "b", *PARTS, f"--resume={tmp_path}", size=2)


def test_ranks_that_do_not_see_the_folder_get_all_from_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = record(tmp_path / "a", *PARTS, "--parallel.shard=optimizer", size=2)
    _stopped(tmp_path, "--parallel.shard=optimizer", size=2)
    index = read_together._index
    monkeypatch.setattr(read_together, "_index", lambda *given: {**index(*given), "manifest": "of rank 0"})
    found = record(tmp_path, *PARTS, "--parallel.shard=optimizer", size=2)
    check_same(found.state(), first.state(), exchange=None)
