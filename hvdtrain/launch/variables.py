"""Which variables ranks get from the process that starts the job, and which ones nobody else may see."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PASSED = ("HVDTRAIN_", "HOROVOD_", "OMP_", "KMP_", "MKL_", "TORCH_", "PYTORCH_", "TRITON_", "GLOO_", "NCCL_", "UCX_",
           "FI_", "I_MPI_", "PYTHON", "HF_", "TOKENIZERS_", "APPTAINER", "SINGULARITY")  # fmt: skip
FOUND_BY = ("PATH", "LD_LIBRARY_PATH")
"""Variables that tell ranks on other hosts where to find programs and libraries."""
_PASSED_NAMES = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"})
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"})
"""In capitals and in small letters."""
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
