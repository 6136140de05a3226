"""Which variables ranks get from the process that starts the job, which ones nobody else may see, and its software."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

_PASSED = ("HVDTRAIN_", "HOROVOD_", "OMP_", "KMP_", "MKL_", "TORCH_", "PYTORCH_", "TRITON_", "GLOO_", "NCCL_", "UCX_",
           "FI_", "I_MPI_", "PYTHON", "HF_", "TOKENIZERS_", "APPTAINER", "SINGULARITY")  # fmt: skip
FOUND_BY = ("PATH", "LD_LIBRARY_PATH")
"""Variables that tell ranks on other hosts where to find programs and libraries."""
_PASSED_NAMES = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"})
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"})  # in capitals and in small letters
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "HOROVOD_RANK",
            "HOROVOD_SIZE")  # fmt: skip
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSPHRASE|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$")
_OF_SLURM = frozenset({"SLURM_CONF", "SLURM_JWT"})
"""Variables that Slurm's commands read; others that begin with SLURM describe a job."""


def passed_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that ranks on other hosts always get: those of the libraries they use."""
    return [
        name
        for name in environment
        if (name.startswith(_PASSED) or name in _PASSED_NAMES or name.upper() in _PROXIES)
        and not name.startswith(_FOREIGN)
        and re.fullmatch("[A-Za-z0-9_]+", name)
    ]


def secret_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that hold a secret: by their name, or as a password in the URL of a proxy."""
    return sorted(
        name
        for name, value in environment.items()
        if _SECRET.search(name.upper()) or (name.upper() in _PROXIES and "@" in value)
    )


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent and its ranks on this host, without variables of other launchers."""
    return {k: v for k, v in environment.items() if not k.startswith(_FOREIGN)}


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an srun that starts a step in this job, without options of other steps in variables."""
    kept = {*_OF_SLURM, "SLURM_JOB_ID"}
    own = agent_environment(environment)
    return {k: v for k, v in own.items() if not k.startswith(("SLURM", "SRUN_")) or k in kept}


def submit_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a scheduler's command, which passes it to the job and may show it to other users.

    It has no secrets and no variables of the job in which the command runs: a new job would take them for its own.
    """
    secrets = secret_variables(environment)
    left = {k: v for k, v in agent_environment(environment).items() if k not in secrets}
    return {k: v for k, v in left.items() if not k.startswith("SLURM") or k in _OF_SLURM}


def setup_lines(environ: Mapping[str, str]) -> list[str]:
    """Return the commands with which a batch script restores the software of this shell, each below its reason.

    Environment modules (Lmod and the Tcl version set the same variables), Spack, conda, virtual environments. A job
    starts on another host, by a shell that is not a login shell, and the scheduler may not pass the environment on. A
    failing command ends the script: without its software the job would fail later, with a less clear error.
    """
    commands = [*_modules(environ), *_spack(environ), *_conda(environ), *_venv(environ)]
    return [f"# {reason}\n{command}" for reason, command in commands]


def _modules(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    if not loaded:
        return
    if home := environ.get("MODULESHOME"):
        start = f"command -v module >/dev/null || {_source(home, 'init/bash')}"
        yield "the command module, which only a login shell is sure to have", start
    if path := environ.get("MODULEPATH"):
        yield "where modules were found, module use included", f"export MODULEPATH={shlex.quote(path)}"
    yield "the modules that were loaded, and no others", "module purge"
    yield "in the order in which they were loaded", _or_exit("module", "load", *loaded)


def _spack(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    folder, root = environ.get("SPACK_ENV"), environ.get("SPACK_ROOT")
    if not folder:
        return
    if root:
        yield "the command spack as a function of the shell", _source(root, "share/spack/setup-env.sh")
    yield "the Spack environment that was active", _or_exit("spack", "env", "activate", "--dir", folder)


def _conda(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    prefix, program = environ.get("CONDA_PREFIX"), environ.get("CONDA_EXE")
    if not prefix:
        return
    if program:
        base = str(PurePosixPath(program).parent.parent)
        yield "the command conda as a function of the shell", _source(base, "etc/profile.d/conda.sh")
        yield "the conda environment that was active, by its path", _or_exit("conda", "activate", prefix)
    else:  # packed, or micromamba's: the program that would activate it is unknown
        reason = "the conda environment that was active, without its activation scripts: no CONDA_EXE was set"
        yield reason, f"export CONDA_PREFIX={shlex.quote(prefix)} PATH={shlex.quote(prefix + '/bin')}:$PATH"


def _venv(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if folder := environ.get("VIRTUAL_ENV"):
        yield "the virtual environment that was active", _source(folder, "bin/activate")


def _source(folder: str, file: str) -> str:
    return _or_exit(".", str(PurePosixPath(folder) / file))


def _or_exit(*words: str) -> str:
    return f"{shlex.join(words)} || exit"
