"""Labels for the torch and the MPI of a Horovod build, as part of its version number.

A local version (PEP 440) consists of lower-case letters and digits, in segments joined by dots. A segment of digits is
a number: ``01`` becomes ``1``. The normalization leaves these labels unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    def label(self) -> str:
        """Part of a local version: ``openmpi4.1.8``."""
        return f"{self.flavour}{self.version}"

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
        parts = [self.torch.label, self.mpi.label] + ([f"nccl{self.nccl}"] if self.nccl else [])
        return ".".join(parts)

    @classmethod
    def parse(cls, text: str) -> Label | None:
        """Parse a label; None if the text is not a label."""
        found = _LABEL.fullmatch(text)
        if not found:
            return None
        torch = TorchBuild(found["torch"], found["cuda"], found["build"] or "")
        return cls(torch, MpiBuild(found["flavour"], found["mpi"]), found["nccl"])
