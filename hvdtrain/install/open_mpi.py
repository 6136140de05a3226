"""Environment variables with which Open MPI's mpirun starts ranks as root and without ssh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

ROOT_MAY_RUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI refuses root without both."""

REMOTE_SHELL = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
"""Variables that name the program to use instead of ssh, of Open MPI 4 and 5."""

NO_SHELL = "/bin/false"


def start_variables(flavour: str, major: int, *, is_root: bool, remote_shell: bool) -> dict[str, str]:
    """Return what mpirun needs to start ranks on this host; nothing for other MPIs.

    Without ssh and rsh Open MPI 4 starts nothing (its issue 12386), and Open MPI 5.0.11 gives this host no more slots
    than it has cores, whatever ``--host`` says. Both accept any existing program, as they never call it.

    Args:
        flavour: of the MPI, such as openmpi.
        major: its major version.
        is_root: whether the user is root.
        remote_shell: whether mpirun finds ssh or rsh, or does not need them.
    """
    if flavour != "openmpi":
        return {}
    return {**(ROOT_MAY_RUN if is_root else {}), **({} if remote_shell else {REMOTE_SHELL[major >= 5]: NO_SHELL})}


def has_remote_shell(environ: Mapping[str, str]) -> bool:
    """Check whether Open MPI's mpirun finds ssh or rsh, or is set to use something else."""
    if {"OMPI_MCA_plm", *REMOTE_SHELL} & {*environ}:
        return True
    path = environ.get("PATH", os.defpath)
    return any(shutil.which(name, path=path) is not None for name in ("ssh", "rsh"))
