"""Read a user's or site's settings from Open MPI's parameter files.

An ``OMPI_MCA_*`` variable overrides these files, so ours would silently undo a site's settings: read the files first.
They are those that ``ompi_info`` lists as ``mca_param_files`` and ``mca_base_override_param_file``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PREFIX = "OMPI_MCA_"
_FILES = f"{PREFIX}mca_base_param_files"


def open_mpi_files(environ: Mapping[str, str], library: Path | None) -> list[Path]:
    """Return the parameter files, highest priority first. ``library``: the libmpi in use."""
    if own := environ.get(_FILES) or environ.get(f"{PREFIX}mca_param_files"):
        return [Path(part) for part in own.replace(",", ":").split(":") if part]
    folders = [Path("/etc/openmpi")]
    if library is not None:
        # Debian's library is two folders below its prefix, which links etc to /etc/openmpi
        folders = [library.parent.parent / "etc", library.resolve().parent.parent / "etc", *folders]
    if prefix := environ.get("OPAL_PREFIX"):
        folders.insert(0, Path(prefix) / "etc")
    if etc := environ.get("OPAL_SYSCONFDIR"):
        folders.insert(0, Path(etc))
    home = [Path(environ["HOME"]) / ".openmpi/mca-params.conf"] if "HOME" in environ else []
    override = [folder / "openmpi-mca-params-override.conf" for folder in folders]
    return [*override, *home, *(folder / "openmpi-mca-params.conf" for folder in folders)]


def read_parameters(text: str) -> dict[str, str]:
    """Parse ``name = value`` lines; ``#`` starts a comment. A later line wins."""
    lines = (line.split("#", 1)[0].partition("=") for line in text.splitlines())
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in lines if equals and name.strip()}


def site_settings(environ: Mapping[str, str], library: Path | None) -> dict[str, tuple[str, Path]]:
    """Return the settings of the files as (value, file), by the environment variable that would override each."""
    found: dict[str, tuple[str, Path]] = {}
    for path in open_mpi_files(environ, library):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        for name, value in read_parameters(text).items():
            found.setdefault(PREFIX + name, (value, path))
    return found
