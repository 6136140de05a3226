"""Open MPI 4 and 5: ``mpirun`` over ssh, or inside an allocation of a scheduler.

Options from mpirun(1) of Open MPI 4.1.8 and 5.0.11. Version 5 starts ranks by PRRTE, which has other parameters for
ssh, and none for the network of its daemons (``oob``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.install.mpirun import start_variables
from hvdtrain.launch.spec import Command, JobSpec, Mpi
from hvdtrain.launch.targets.base import for_ssh, mpirun, network_variables
from hvdtrain.launch.targets.container import rank_argv


def render(spec: JobSpec) -> Command:
    """Return the start by mpirun."""
    return Command(argv(spec, ("--host", spec.host_list or f"localhost:{spec.ranks}")), variables(spec))


def argv(spec: JobSpec, where: Sequence[str]) -> tuple[str, ...]:
    """Return the command line. `where`: the options that list the hosts."""
    assert spec.mpi is not None
    # By default mpirun binds each of two ranks to one core, which all threads of the rank then share.
    words = [spec.mpi.mpirun, "-np", str(spec.ranks), *where, "--map-by", "slot", "--bind-to", "none"]
    if spec.remote:
        words += _between_hosts(spec, spec.mpi)
        words += [word for name in (*spec.pass_on, *network_variables(spec)) for word in ("-x", name)]
    return (*words, *spec.launcher_arguments, *rank_argv(spec))


def variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for mpirun's environment."""
    assert spec.mpi is not None
    shell = spec.remote_shell or spec.remote
    own = start_variables(spec.mpi.flavour, spec.mpi.major, is_root=spec.is_root, remote_shell=shell)
    return {**own, **(network_variables(spec) if spec.remote else {})}


def _between_hosts(spec: JobSpec, mpi: Mpi) -> Iterator[str]:
    if mpi.prefix is not None:
        yield from ("--prefix", mpi.prefix)
    if spec.interface:
        yield from ("--mca", "btl_tcp_if_include", spec.interface)
        own = ("--mca", "oob_tcp_if_include") if mpi.major < 5 else ("--prtemca", "prte_if_include")
        yield from (*own, spec.interface)
    if to_ssh := for_ssh(spec):
        own = ("--mca", "plm_rsh_args") if mpi.major < 5 else ("--prtemca", "plm_ssh_args")
        yield from (*own, to_ssh)


TARGET = mpirun("openmpi", render)
