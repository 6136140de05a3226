"""MPICH and Intel MPI: ``mpirun`` and ``mpiexec.hydra``, over ssh.

Options from ``mpirun -help`` of MPICH 5.0.2 and Intel MPI 2021.17. Intel's own variables:
https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/2021-17/hydra-environment-variables.html
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets.base import for_ssh, mpirun, network_variables
from hvdtrain.launch.targets.container import rank_argv


def render(spec: JobSpec) -> Command:
    """Return the start by mpirun."""
    assert spec.mpi is not None
    if not spec.hosts:
        where: tuple[str, ...] = ()
    elif spec.mpi.flavour == "mpich":
        where = ("-hosts", spec.host_list)
    else:  # Intel's Hydra ignores a number after a colon
        where = ("-ppn", str(max(spec.hosts.values())), "-hosts", ",".join(spec.hosts))
    return Command(argv(spec, where), variables(spec))


def argv(spec: JobSpec, where: Sequence[str]) -> tuple[str, ...]:
    """Return the command line. `where`: the options that list the hosts."""
    assert spec.mpi is not None
    if spec.mpi.flavour == "mpich":
        words = [spec.mpi.mpirun, "-np", str(spec.ranks), *where, "-bind-to", "none"]
    else:
        # Intel's mpirun is a script that dies of SIGUSR1, the request for a checkpoint, and does not forward it.
        words = [spec.mpi.mpirun.removesuffix("mpirun") + "mpiexec.hydra", "-np", str(spec.ranks), *where]
    if spec.remote:
        words += ["-iface", spec.interface] if spec.interface else []
        names = (*spec.pass_on, *network_variables(spec))
        words += ["-genvlist", ",".join(names)] if names else []
    return (*words, *spec.launcher_arguments, *rank_argv(spec))


def variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for mpirun's environment."""
    assert spec.mpi is not None
    extra = for_ssh(spec)
    network = network_variables(spec) if spec.remote else {}
    if spec.mpi.flavour == "mpich":
        return {**({"HYDRA_LAUNCHER_EXTRA_ARGS": extra} if extra else {}), **network}
    # By default Intel MPI pins each rank to its share of the cores.
    own = {"I_MPI_PIN": "off", **network}
    if spec.mpi.prefix is not None:
        own["I_MPI_ROOT"] = spec.mpi.prefix
    if extra:
        own["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = extra
    return own


MPICH = mpirun("mpich", render)
INTEL = mpirun("intelmpi", render, even=True)
