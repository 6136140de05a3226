"""Files are written whole or not at all, and as many may be open as the system allows."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain import files
from hvdtrain.files import is_private, write_text


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
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


def test_the_file_is_on_the_disk_before_its_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = files.os.fsync
    monkeypatch.setattr(
        files.os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())) or real(file)
    )
    for text in ("one", "two"):
        write_text(tmp_path / "file", text)
        assert re.fullmatch(r"\.file\.\w+\.writing", Path(synced[0]).name) and synced[1:] == [str(tmp_path)]
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == text
        synced.clear()


def test_many_may_write_a_file_at_the_same_time(tmp_path: Path) -> None:
    texts = [f"{number}\n" * 20_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_text(tmp_path / "file", text), texts))
    assert (tmp_path / "file").read_text() in texts and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("mode", "group", "members", "private"),
    [
        (0o644, "users", ["you"], True),
        (0o664, "me", ["me"], True),
        (0o664, "me", ["me", "you"], False),
        (0o664, "users", ["me"], False),
        (0o666, "me", [], False),
    ],
)
def test_only_root_and_this_user_may_write(
    mode: int, group: str, members: list[str], private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group counts as this user if it has the user's name and no other member."""
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    (tmp_path / "a").touch()
    (tmp_path / "a").chmod(mode)
    assert is_private((tmp_path / "a").stat()) is private


@pytest.mark.parametrize("program", ["hvdtrain.__main__", "hvdtrain.training.api", "hvdtrain.launch.agent"])
def test_every_start_may_open_as_many_files_as_the_system_allows(program: str) -> None:
    begin = {
        "hvdtrain.__main__": "main(['--version'])",
        "hvdtrain.training.api": "train({'train': {'steps': -1}})",
        "hvdtrain.launch.agent": "main({'type': 'hello'})",
    }
    code = f"""
import resource
from contextlib import suppress
import {program}
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
with suppress(BaseException):
    {program}.{begin[program]}
raise SystemExit(resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 200)
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 200
    assert subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode == 0
