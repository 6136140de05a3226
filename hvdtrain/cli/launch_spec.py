"""Build a job, and the plan of our own driver, from the options of ``hvdtrain launch``."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.cli.launch_options import AFTER_DASHES
from hvdtrain.errors import LaunchError
from hvdtrain.install.versions import has_remote_shell
from hvdtrain.launch.choose import AUTO, OWN, Choice, options_of
from hvdtrain.launch.detect import Machine, find_container_runtime, search_path
from hvdtrain.launch.hosts import LOCAL_NAMES, allocated_gpus, parse_hosts, slurm_slots
from hvdtrain.launch.job import Limits
from hvdtrain.launch.site import NO_SITE, Site
from hvdtrain.launch.spec import PYTHON, Batch, Container, JobSpec
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.variables import FOUND_BY, passed_variables, secret_variables, setup_lines
from hvdtrain.launch.worker_plan import WorkerPlan, allocation_slots, find_starter
from hvdtrain.runtime.environment import JOB, LAUNCH_OPTIONS, launch_options_text
from hvdtrain.runtime.interfaces import address_of, networks


def spec_of(
    options: argparse.Namespace, choice: Choice, machine: Machine, environ: Mapping[str, str], site: Site = NO_SITE
) -> JobSpec:
    """Build the job. `environ` has the variables of the site.

    Errors: LaunchError: the number of ranks is missing, or an option has no meaning.
    """
    from hvdtrain.__main__ import COMMANDS

    target = TARGETS.get(choice.target)
    hosts = parse_hosts(options.hosts) if options.hosts else _allocated(choice.target, options, environ)
    elastic = _range(options.elastic)
    ranks = options.np or sum(hosts.values()) or (options.nodes or 1) * (options.gpus_per_node or 0)
    if not ranks:
        next_step = "-np N, or -H a:4,b:4, or --nodes N --gpus-per-node M"
        raise LaunchError("the number of ranks is missing", next_step=next_step)
    if options.arguments and options.arguments[0] != "--":  # unknown arguments of launch
        raise LaunchError(f"{options.arguments[0]!r} is not an option of launch", next_step=AFTER_DASHES)
    words = tuple(options.arguments[1:])
    # Not an option of training, nor a command of hvdtrain.
    is_program = bool(words) and not words[0].startswith("-") and words[0] not in COMMANDS
    elsewhere = target is not None and target.elsewhere
    own = {name: value for name, value in site.environment.items() if elsewhere or environ[name] == value}
    if is_program and not elsewhere and not options.container:
        _refuse_missing(words)
    spec = JobSpec(
        arguments=words,
        ranks=ranks,
        nodes=options.nodes or min(len(hosts), ranks) or 1,
        hosts=hosts,
        host=platform.node(),
        python=sys.executable,
        gpus_per_node=options.gpus_per_node or 0,
        cpus_per_rank=options.cpus_per_rank or 0,
        elastic=elastic,
        discover=str(options.discover) if options.discover else None,
        folder=str(Path.cwd()),
        name=options.name,
        pass_on=tuple(options.env) if elsewhere else _passed(options.env, choice.target, environ),
        site_variables=own,
        interface=options.interface,
        ssh_port=options.ssh_port,
        ssh_options=tuple(options.ssh_option),
        mpi=choice.mpi,
        launcher_arguments=tuple(options.launcher_arg),
        in_step=_starts_inside(choice.target) and "SLURM_STEP_ID" in environ,
        slurm_mpi=machine.slurm_mpi_for(choice.mpi),
        is_program=is_program,
        is_root=os.geteuid() == 0,
        remote_shell=has_remote_shell(environ),
        container=_container(options, choice.target, environ),
        agents=options.agents,
    )
    return replace(spec, batch=_batch(options, machine, _setup(site, own, environ), spec))


def idle_gpus(spec: JobSpec, target: str, environ: Mapping[str, str]) -> str:
    """Return a note about GPUs that the job would not use; "" if there are none."""
    gpus, hosts = spec.gpus_per_node, spec.nodes
    if not gpus and _starts_inside(target) and "SLURM_JOB_NODELIST" in environ:
        gpus, hosts = allocated_gpus(environ), len(spec.hosts)
    ranks = spec.elastic[1] if spec.elastic else spec.ranks
    total = gpus * hosts
    if ranks >= total:
        return ""
    each = ", unless the program uses several in each rank" if spec.is_program else ": each rank uses one"
    return f"{ranks} ranks leave {total - ranks} of {total} GPUs idle{each}; for all: -np {total}"


def plan_of(own: Sequence[str], options: argparse.Namespace, spec: JobSpec, environ: Mapping[str, str]) -> WorkerPlan:
    """Build the plan of our own driver. `own`: the options as typed.

    Errors: LaunchError: agents cannot be started in the requested way.
    """
    least, most = spec.elastic or (spec.ranks, spec.ranks)
    limits = Limits(
        start=spec.ranks,
        least=least,
        most=most,
        elastic=spec.elastic is not None,
        restarts=options.restarts,
        reset_limit=options.reset_limit,
        hang_timeout_s=options.hang_timeout,
        elastic_timeout_s=options.elastic_timeout,
        start_timeout_s=options.start_timeout,
        gloo_timeout_s=options.gloo_timeout or 0,
    )
    if spec.is_program:
        limits = replace(limits, grace_s=math.inf)  # a rank may work longer than the others
    agents = spec.agents if spec.remote or spec.discover else AUTO
    starter = find_starter(agents, environ, search_path(environ))
    here = (spec.host, environ.get("SLURMD_NODENAME", ""), *options.local.split(","))
    interface = spec.interface or next(iter(networks().values()), "")
    variables = {**environ, LAUNCH_OPTIONS: launch_options_text(own), JOB: secrets.token_hex(8)}
    return WorkerPlan(
        spec,
        program=_rank_program(spec),
        limits=limits,
        hosts=spec.hosts or {"localhost": most},
        slots=options.slots,
        local=frozenset({*LOCAL_NAMES, *filter(None, here), *starter.names_of(here)}),
        environment=variables,
        pass_on=tuple(options.env),
        events=options.events,
        tag=options.tag,
        starter=starter,
        address=address_of(interface) if interface else "",
    )


def _rank_program(spec: JobSpec) -> tuple[str, ...]:
    """Return the command of a rank. An elastic program talks to the driver itself, by `hvdtrain.torch`."""
    alone = spec.is_program and spec.elastic is None
    return (spec.python, "-m", "hvdtrain.launch.own_task", *spec.program) if alone else spec.program


def _passed(asked: Sequence[str], target: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that ranks on other hosts get; those of a queued job without secrets."""
    missing = next((name for name in asked if name not in environ), None)
    if missing is not None:
        what = f"--env {missing}: the variable is not set in this environment"
        raise LaunchError(what, next_step=f"export {missing}=...")
    hidden = secret_variables(environ) if target != OWN and TARGETS[target].shows_variables else []
    shown = next((name for name in asked if name in hidden), None)
    if shown is not None:
        raise LaunchError(
            f"--env {shown}: --to {target} would show its value to other users",
            expected="variables that are no secrets",
            next_step="write it to a file that only you can read, and have the job read that: such as ~/.netrc, or"
            " ~/.cache/huggingface/token",
        )
    names = dict.fromkeys([*FOUND_BY, *passed_variables(environ), *asked])
    return tuple(name for name in names if name in environ and name not in hidden)


def _allocated(target: str, options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, int]:
    """Return the hosts of the Slurm, PBS or LSF allocation of this process, for targets that start ranks in it."""
    if not _starts_inside(target) or options.discover is not None:
        return {}
    if "SLURM_JOB_NODELIST" in environ:
        return slurm_slots(environ, options.gpus_per_node or 0, options.np or 0)
    return dict(Counter(allocation_slots(environ)))


def _starts_inside(target: str) -> bool:
    """Check whether a target starts ranks in the allocation of this process."""
    return "time" not in options_of(target)


def _container(options: argparse.Namespace, target: str, environ: Mapping[str, str]) -> Container | None:
    """Return the container of the ranks. A target that starts them from here looks for GPUs here too."""
    if not options.container:
        return None
    here = _starts_inside(target) and (allocated_gpus(environ) > 0 or Path("/proc/driver/nvidia/version").exists())
    image, asked, by_srun = str(options.container), options.container_runtime, TARGETS[target].by_srun
    return Container(
        image=str(Path(image).resolve()) if image.startswith(("./", "../")) else image,
        runtime=find_container_runtime(asked, image, target, environ, by_srun=by_srun),
        mounts=tuple(options.container_mount),
        gpus=bool(options.gpus_per_node) or here,
        override=tuple(options.env),
    )


def _batch(options: argparse.Namespace, machine: Machine, setup: tuple[str, ...], spec: JobSpec) -> Batch:
    """Return the requests. What is not training may not be able to resume, so it is requeued only on request."""
    return Batch(
        time_s=options.time,
        queue=options.queue,
        account=options.account,
        mem_mib=options.mem or 0,
        chunk=tuple(options.chunk),
        notice_s=options.notice,
        requeues=options.requeues if options.requeues is not None else Batch.requeues if spec.trains else 0,
        resubmissions=options.requeues or 0,
        preflight=options.preflight and spec.arguments[:1] != ("preflight",),
        directives=tuple(options.directive),
        image=options.image,
        namespace=options.namespace,
        resources=_resources(options.resource),
        setup=setup,
    )


def _resources(pairs: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    name, times = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if times > 1:
        raise LaunchError(f"--resource {name} is given {times} times", expected="each resource once")
    return tuple(pairs)


def _setup(site: Site, variables: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the lines of shell of a script: the site's first, as they may be those that define the command module."""
    loaded = environ.get("LOADEDMODULES", "").split(":")
    modules = ":".join(filter(None, [*site.missing_modules(environ), *loaded]))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return (*site.setup, *setup_lines({**environ, "LOADEDMODULES": modules}), *exports)


def _refuse_missing(words: Sequence[str]) -> None:
    """Raise LaunchError where the program is not on this machine or not executable."""
    name = words[0]
    if name in PYTHON or shutil.which(name) is not None:
        return
    next_step = "give its path, -- ./NAME; options of training start with --"
    if name.endswith(".py"):
        next_step = f"-- python {name}"
    raise LaunchError(f"there is no program {name} on this machine", expected=f"{name} on PATH", next_step=next_step)


def _range(text: str | None) -> tuple[int, int] | None:
    """Parse ``MIN:MAX``."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})", text)
    if not found:
        raise LaunchError("--elastic is not MIN:MAX with MIN <= -np <= MAX", expected="such as 2:4", found=repr(text))
    return int(found[1]), int(found[2])
