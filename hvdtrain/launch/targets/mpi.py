"""Start ranks by the mpirun of an MPI, over ssh or inside an allocation, and by horovodrun, which calls it.

Options from mpirun(1) of Open MPI 4.1.8 and 5.0.11, and from ``mpirun -help`` of MPICH 5.0.2 and Intel MPI 2021.17.
Version 5 of Open MPI starts ranks by PRRTE, which has other parameters for ssh, and none for the network of its daemons
(``oob``). Intel's own variables:
https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/2021-17/hydra-environment-variables.html
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hvdtrain.errors import LaunchError
from hvdtrain.install.versions import start_variables
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import Command, JobSpec, Mpi
from hvdtrain.launch.targets.base import BY_MPI, Pick, Target, for_ssh, network_variables, rank_argv


def render(spec: JobSpec) -> Command:
    """Return the start by mpirun."""
    assert spec.mpi is not None
    where: tuple[str, ...] = ()
    if spec.mpi.flavour == "openmpi":
        where = ("--host", spec.host_list or f"localhost:{spec.ranks}")
    elif spec.hosts and spec.mpi.flavour == "mpich":
        where = ("-hosts", spec.host_list)
    elif spec.hosts:  # Intel's Hydra ignores a number after a colon
        where = ("-ppn", str(max(spec.hosts.values())), "-hosts", ",".join(spec.hosts))
    return Command(argv(spec, where), variables(spec))


def argv(spec: JobSpec, where: Sequence[str]) -> tuple[str, ...]:
    """Return the command line. `where`: the options that list the hosts."""
    assert spec.mpi is not None
    words = [spec.mpi.mpirun, "-np", str(spec.ranks), *where]
    names = (*spec.pass_on, *network_variables(spec)) if spec.remote else ()
    if spec.mpi.flavour == "openmpi":
        # By default mpirun binds each of two ranks to one core, which all threads of the rank then share.
        words += ["--map-by", "slot", "--bind-to", "none"]
        words += _between_hosts(spec, spec.mpi) if spec.remote else []
        words += [word for name in names for word in ("-x", name)]
    else:
        if spec.mpi.flavour == "mpich":
            words += ["-bind-to", "none"]
        else:  # Intel's mpirun is a script that dies of SIGUSR1, the request for a checkpoint, and does not forward it
            words[0] = spec.mpi.mpirun.removesuffix("mpirun") + "mpiexec.hydra"
        words += ["-iface", spec.interface] if spec.remote and spec.interface else []
        words += ["-genvlist", ",".join(names)] if names else []
    return (*words, *spec.launcher_arguments, *rank_argv(spec))


def variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for mpirun's environment."""
    assert spec.mpi is not None
    network = network_variables(spec) if spec.remote else {}
    if spec.mpi.flavour == "openmpi":
        shell = spec.remote_shell or spec.remote
        return {**start_variables("openmpi", spec.mpi.major, is_root=spec.is_root, remote_shell=shell), **network}
    to_ssh = for_ssh(spec)
    if spec.mpi.flavour == "mpich":
        return {**({"HYDRA_LAUNCHER_EXTRA_ARGS": to_ssh} if to_ssh else {}), **network}
    own = {"I_MPI_PIN": "off", **network}  # by default it pins each rank to its share of the cores
    own |= {"I_MPI_ROOT": spec.mpi.prefix} if spec.mpi.prefix is not None else {}
    return own | ({"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": to_ssh} if to_ssh else {})


def _between_hosts(spec: JobSpec, mpi: Mpi) -> Iterator[str]:
    """Yield Open MPI's options."""
    if mpi.prefix is not None:
        yield from ("--prefix", mpi.prefix)
    if spec.interface:
        yield from ("--mca", "btl_tcp_if_include", spec.interface)
        own = ("--mca", "oob_tcp_if_include") if mpi.major < 5 else ("--prtemca", "prte_if_include")
        yield from (*own, spec.interface)
    if to_ssh := for_ssh(spec):
        own = ("--mca", "plm_rsh_args") if mpi.major < 5 else ("--prtemca", "plm_ssh_args")
        yield from (*own, to_ssh)


def _mpirun(flavour: str, *, even: bool = False) -> Target:
    """Return the target of the mpirun of an MPI; ``--to`` has the name of its flavour."""
    return Target(flavour, render, BY_MPI, lambda here, in_image: (here.mpi_named(flavour, in_image), ""), even=even)


OPENMPI, MPICH, INTEL = _mpirun("openmpi"), _mpirun("mpich"), _mpirun("intelmpi", even=True)


def render_horovodrun(spec: JobSpec) -> Command:
    """Return the start by Horovod's own launcher: over MPI where it can drive that, else over Gloo; elastic over Gloo.

    It passes on all variables except those that it refuses. For an Open MPI from a wheel it needs the prefix. Errors:
    LaunchError for an elastic job on this host alone, which it refuses.
    """
    if spec.elastic is not None and spec.discover is None and spec.nodes < 2:
        raise LaunchError(
            "horovodrun runs elastic jobs only on two or more hosts",
            expected="--discover SCRIPT, or -H with two hosts",
            found="this host alone",
            next_step="use --to hvdtrain, which runs them on one host too",
        )
    mpi = spec.mpi if spec.elastic is None else None
    words = ["horovodrun", "-np", str(spec.ranks)]
    words += [] if mpi else ["--gloo"]
    if spec.elastic is not None:
        least, most = spec.elastic
        words += ["--min-np", str(least), "--max-np", str(most)]
    if spec.discover is not None:
        words += ["--host-discovery-script", spec.discover]
    else:
        words += ["-H", spec.host_list or f"localhost:{spec.ranks}"]
    words += ["--network-interface", spec.interface] if spec.interface else []
    words += ["--ssh-port", str(spec.ssh_port)] if spec.ssh_port else []
    if mpi and spec.remote and mpi.prefix:
        words += [f"--mpi-args=--prefix {shlex.quote(mpi.prefix)}"]  # a shell reads it
    return Command((*words, *spec.program), variables(spec) if mpi else {})


def _choose_horovodrun(machine: Machine, in_image: bool) -> Pick:
    """Pick an Open MPI 4, the only MPI that horovodrun supports."""
    mpi = machine.own_mpi
    if mpi is None or (mpi.flavour, mpi.major) != ("openmpi", 4):
        return None, "; over Gloo, as horovodrun supports only Open MPI 4"
    return mpi, ""


_TAKES = frozenset({"hosts", "interface", "ssh_port", "elastic", "discover"})
HOROVODRUN = Target("horovodrun", render_horovodrun, _TAKES, choose=_choose_horovodrun, shows_variables=True)
