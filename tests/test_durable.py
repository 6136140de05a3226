"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.durable import write_text


def test_a_file_is_written_and_written_over(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_text(tmp_path / "file", text)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == text


def test_what_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "missing" / "file", "text")
    write_text(tmp_path / "file", "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "file", "no text: \udcff")
    assert {path.name for path in tmp_path.rglob("*")} == {"folder", "file"}
    assert (tmp_path / "file").read_text() == "before"
