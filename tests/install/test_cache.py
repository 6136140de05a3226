from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.cli.cache import main
from hvdtrain.install import cache
from hvdtrain.install.cache import cache_entries, prune
from hvdtrain.task.once_per_host import once_per_host
from hvdtrain.task.token_file import TokenFile

DAY_S = 86_400


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with texts used 1 and 40 days ago, one of a killed process, a model, a wheel, and a build under way."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "substitute_folder", lambda: tmp_path / "substitute")
    root = tmp_path / "hvdtrain"
    for name, days in (
        ("corpus/new", 1),
        ("corpus/old", 40),
        ("corpus/x.tmp-1", 50),
        ("horovod/key", 5),
        ("models/m", 5),
    ):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"x" * 1000)
        if name in ("corpus/new", "corpus/old"):
            TokenFile("tokens.bin", "<u2", 0, 400, 100, 300, "").save(folder)
            folder.with_name(f"{folder.name}.lock").touch()
        if name == "models/m":
            (folder / "source.json").write_text('{"of": "dcp:there", "left": []}')
        os.utime(folder, (0, 1000 * DAY_S - days * DAY_S))
    (root / "horovod" / "key.build").mkdir()
    (root / "horovod" / "lock").touch()
    return root


def test_entries_and_what_is_removed(root: Path) -> None:
    entries = cache_entries(os.environ)
    about = {"new": "500 tokens", "old": "500 tokens", "x.tmp-1": "incomplete", "key": "wheel of Horovod"}
    about["m"] = "weights of dcp:there"
    assert {entry.path.name: entry.about for entry in entries} == about
    assert all(entry.size_bytes >= 1000 for entry in entries)
    removed = prune(entries, 30, now_s=1000.0 * DAY_S)
    assert [entry.path.name for entry in removed] == ["old", "x.tmp-1"]
    assert sorted(path.name for path in (root / "corpus").iterdir()) == ["new", "new.lock"]
    assert sorted(path.name for path in (root / "horovod").iterdir()) == ["key", "key.build", "lock"]


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, count in (([], 5), (["--prune", "0"], 5), (["--prune", "0"], 0)):
        assert main(arguments) == 0
        assert f"{count} folder(s)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--prune", "-1"])


def test_a_link_in_the_temporary_folder_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have made it, so that a prune removes folders of this one."""
    substitute = cache.substitute_folder()
    substitute.mkdir()
    (substitute / "corpus").symlink_to(root / "corpus")
    assert len(cache_entries(os.environ)) == 8  # a link of this user
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert len(cache_entries(os.environ)) == 5


def test_use_is_noted(root: Path) -> None:
    found = once_per_host("corpus", "old", pytest.fail, lambda folder: TokenFile.load(folder) is not None)
    assert found.name == "old"
    assert [entry.path.name for entry in prune(cache_entries(os.environ), 30)] == ["new", "x.tmp-1", "m", "key"]
