"""Open MPI's parameter files: which are read, what they say, which wins."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.runtime.tuning import read_parameters, site_settings
from tests.runtime.libraries import open_mpi


def test_parameters_are_read_as_open_mpi_reads_them() -> None:
    text = "# a comment\nmpi_yield_when_idle = 0\n\ncoll_tuned_priority=30 # why\nbtl = ^x\nmpi_yield_when_idle=1\nx"
    assert read_parameters(text) == {"mpi_yield_when_idle": "1", "coll_tuned_priority": "30", "btl": "^x"}


def test_the_users_file_wins_over_the_installations(tmp_path: Path) -> None:
    library = open_mpi(tmp_path / "mpi", 4)
    site, user = tmp_path / "mpi/etc/openmpi-mca-params.conf", tmp_path / "home/.openmpi/mca-params.conf"
    for path, text in ((site, "a = site\nb = site"), (user, "a = user")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    home = {"HOME": str(tmp_path / "home")}
    assert site_settings(home, library) == {"OMPI_MCA_a": ("user", user), "OMPI_MCA_b": ("site", site)}
    named = site_settings({"OPAL_PREFIX": str(tmp_path / "mpi")}, None)
    assert named["OMPI_MCA_b"] == ("site", site), "the prefix that the launcher names counts"
    override = site.with_name("openmpi-mca-params-override.conf")
    override.write_text("a = override")
    assert site_settings(home, library)["OMPI_MCA_a"] == ("override", override)


def test_other_files_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "one.conf").write_text("a = 1")
    (tmp_path / "two.conf").write_text("a = 2\nb = 2")
    named = {"OMPI_MCA_mca_base_param_files": f"{tmp_path}/one.conf,{tmp_path}/two.conf", "HOME": str(tmp_path)}
    found = site_settings(named, None)
    assert {name: value for name, (value, _) in found.items()} == {"OMPI_MCA_a": "1", "OMPI_MCA_b": "2"}
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    unreadable = f"{tmp_path}/none:{tmp_path}/binary:{tmp_path}"
    assert site_settings({"OMPI_MCA_mca_base_param_files": unreadable}, None) == {}
