from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.launch.site import NO_SITE, find_site, parse_site

WHOLE = b"""
hosts: ["alex*", "login?.alex.example", GPU1]
options:
  account: 0123
  time: 1:30:00
  tag: true
  directive: [--qos=high]
environment: {NCCL_IB_HCA: "=mlx5_0:1", UCX_TLS: rc, DEBUG: no}
modules: [openmpi/4.1.8, cuda]
setup:
  - ulimit -l unlimited
"""


def test_scalars_stay_the_text_that_was_written() -> None:
    site = parse_site(WHOLE, Path("/etc/alex.yaml"))
    assert site.options == {"account": "0123", "time": "1:30:00", "tag": "true", "directive": ("--qos=high",)}
    assert site.environment == {"NCCL_IB_HCA": "=mlx5_0:1", "UCX_TLS": "rc", "DEBUG": "no"}
    assert (site.modules, site.setup) == (("openmpi/4.1.8", "cuda"), ("ulimit -l unlimited",))
    assert str(site) == "site alex (/etc/alex.yaml)"


@pytest.mark.parametrize("text", [b"", b"# all\n", b"hosts:\noptions:\nenvironment:\n"])
def test_a_profile_may_have_empty_parts(text: bytes) -> None:
    site = parse_site(text, Path("a.yaml"))
    assert (site.hosts, site.options, site.environment) == ((), {}, {})


def test_patterns_match_the_full_or_the_short_name() -> None:
    matches = parse_site(WHOLE, Path("a.yaml")).matches
    assert all(map(matches, ("alex1", "ALEX1.example", "login1.alex.example", "LOGIN1.alex.example", "gpu1.alex.x")))
    assert not any(map(matches, ("login12.alex.example", "login1", "my-alex")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("option: {queue: gpu}", "options?"),
        ("queue: gpu", "under options:"),
        *((f"hosts: {value}", "hosts is invalid") for value in ("alex", "[[a]]", "['']")),
        ("options: [queue]", "options is invalid"),
        ("options: {queue: {a: b}}", "queue is invalid"),
        ("options: {directive: [{a: b}]}", "directive is invalid"),
        *((f"environment: {value}", "environment is invalid") for value in ("[A]", "{A: [b]}", "{A-B: c}")),
        ("environment: {HF_TOKEN: x}", "HF_TOKEN"),
        *((f"modules: {value}", "name of a module") for value in ("[-f]", "['a; rm']")),
        *((f"setup: {value}", "setup is invalid") for value in ("ulimit", "[!!int 5]")),
        *((text, "is not a mapping") for text in ("- a", "just text")),
        *((text, "is not YAML") for text in ("a: [", "\x00", "hosts: [\udcff]")),
        ("options: !!python/object/apply:os.system [true]", "is not YAML"),
        ("setup: [!!python/object:os.system {}]", "is not YAML"),
        ("hosts: [a]\nhosts: [b]", "hosts twice"),
        ("hosts: &a [*a]", "too deeply"),
        *(
            (f"hosts: [a]\n{text}", "a null character or no Unicode character")
            for text in (r'setup: ["a\0b"]', r'environment: {A: "\ud800"}', r'options: {"\0": x}')
        ),
    ],
)
def test_a_hostile_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(HvdtrainError, match=r"/sites/a\.yaml") as error:
        parse_site(text.encode(errors="surrogateescape"), Path("/sites/a.yaml"))
    assert said in str(error.value)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables that name a folder of this user and one of HVDTRAIN_SITES; the system's is a third."""
    for name in ("own", "config/hvdtrain/sites", "etc"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr("hvdtrain.launch.site._SYSTEM", tmp_path / "etc")
    return {"HVDTRAIN_SITES": str(tmp_path / "own"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def write(path: Path, text: str = "hosts: ['*']", mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_first_folder_and_the_first_match_win(folders: dict[str, str], tmp_path: Path) -> None:
    assert find_site(None, "login1", folders) is NO_SITE
    last = write(tmp_path / "etc/a.yaml", "hosts: [login*]")
    assert find_site(None, "login1", folders).path == last
    assert find_site(None, "other", folders) is NO_SITE and find_site("none", "login1", folders) is NO_SITE
    own = write(tmp_path / "config/hvdtrain/sites/z.yaml", "hosts: [login1]")
    assert find_site(None, "login1", folders).path == own and find_site(None, "login2", folders).path == last
    write(tmp_path / "own/.#b.yaml")  # an editor's
    write(tmp_path / "own/README")
    first = write(tmp_path / "own/a.yaml", "hosts: [log*]")
    assert find_site(None, "login1", folders).path == first == find_site("a", "other", folders).path
    assert find_site("z", "other", folders).path == own


def test_a_profile_that_is_not_there_is_named_with_the_folders(folders: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "etc/a.yaml")
    with pytest.raises(LaunchError, match="no profile of a site 'b'") as wrong:
        find_site("b", "x", folders)
    assert str(tmp_path / "own") in str(wrong.value.expected) and "etc/a.yaml" in str(wrong.value.found)
    for path, why in ((tmp_path / "b.yaml", "No such file"), (tmp_path / "own/", "Is a directory")):
        with pytest.raises(LaunchError, match=why):
            find_site(f"{path}/" if path.is_dir() else str(path), "x", folders)
    with pytest.raises(LaunchError, match="HVDTRAIN_SITES is not a folder"):
        find_site(None, "x", {"HVDTRAIN_SITES": str(tmp_path / "etc/a.yaml")})


@pytest.mark.parametrize("mode", [0o646, 0o666])
def test_a_file_others_can_write_is_refused_unless_named(mode: int, folders: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "own/a.yaml", mode=mode)
    for asked in (None, "a"):
        with pytest.raises(LaunchError, match="other users can change it") as wrong:
            find_site(asked, "x", folders)
        assert f"mode {mode:o}" in str(wrong.value.found)
    assert find_site(str(path), "x", folders).path == path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    """Also one to which a link of this user leads."""
    path = write(tmp_path / "theirs.yaml")
    os.chown(path, 12345, -1)
    (tmp_path / "own/a.yaml").symlink_to(path)
    with pytest.raises(LaunchError, match=r"other users can change it(?s:.*)owner 12345"):
        find_site(None, "x", folders)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused(make: object, folders: dict[str, str], tmp_path: Path) -> None:
    make(tmp_path / "own/a.yaml")  # type: ignore[operator]
    with pytest.raises(LaunchError, match="cannot read the profile"):
        find_site(None, "x", folders)


def test_modules_of_which_the_shell_has_another_version_are_not_missing() -> None:
    site = parse_site(WHOLE, Path("a.yaml"))
    assert site.missing_modules({}) == ["openmpi/4.1.8", "cuda"]
    assert site.missing_modules({"LOADEDMODULES": "gcc/12:openmpi/5.0"}) == ["cuda"]
    by_category = parse_site(b"hosts: [a]\nmodules: [devel/cuda/12.4, devel/python/3.12]", Path("a.yaml"))
    assert by_category.missing_modules({"LOADEDMODULES": "devel/python/3.11"}) == ["devel/cuda/12.4"]
