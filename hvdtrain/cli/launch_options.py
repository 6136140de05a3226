"""Declare and read the options of ``hvdtrain launch``, and suggest the right one for an unknown option."""

from __future__ import annotations

import argparse
import dataclasses
import re
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Sequence
from functools import partial

from hvdtrain.cli.parser import Parser, above_0, local, positive
from hvdtrain.config.schema import Config
from hvdtrain.config.spelling import declared_spelling
from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import AUTO, OWN
from hvdtrain.launch.spec import APPTAINER, PYXIS
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.worker_plan import JOBS, SSH

_DESCRIPTION = """\
Start training, or any program, on several ranks with this machine's MPI or
scheduler, or with hvdtrain's own driver. The driver keeps an elastic job
running while ranks and hosts join and leave. --dry-run prints what would run."""

_OF_HOROVODRUN = {
    **dict.fromkeys(("--min-np", "--max-np", "--min-num-proc", "--max-num-proc"), "--elastic MIN:MAX"),
    **dict.fromkeys(("--np", "--num-proc"), "-np N"),
    "--hosts": "-H a:2,b:2",
    "--host-discovery-script": "--discover SCRIPT",
    **dict.fromkeys(("--network-interface", "--network-interfaces"), "--interface IF"),
    "--array": "a loop of the shell",
    "--pod-patch": "--dry-run, and change what it prints,",
}
"""Options of horovodrun, and those that are no longer there; and what replaces them."""

_OF_TRAINING = {"config", "print_config", *(field.name for field in dataclasses.fields(Config))}
"""First parts of the names of the options of ``hvdtrain train``."""

AFTER_DASHES = "options of training follow --, as in: hvdtrain launch -np 2 -- --train.steps 100"

_seconds = partial(above_0, most=1e9, or_0=True)


def _whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise ArgumentTypeError(f"invalid number {text!r}; expected 0 to 999999")
    return int(text)


def _word(pattern: str, problem: str) -> Callable[[str], str]:
    """Return the type of options that must match a pattern as a whole. `problem`: the message for others."""

    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ArgumentTypeError(f"{text!r} {problem}")
        return text

    return checked


_interface = _word("[A-Za-z0-9_.@:-]{0,15}", "is not a network interface; expected a name such as eth0")
_plain = _word("[!-~]+", "is not one word; expected no spaces")
_name_of_pmi = _word("[a-z][a-z0-9_]*", "is not a kind of srun --mpi=list; expected a name such as pmix or pmi2")
_name = _word(
    "[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?",  # pods' names begin with it: RFC 1035
    "is not a valid name; expected at most 40 of a-z, 0-9 and -, starting with a letter",
)


def _variable(text: str) -> str:
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text):
        name = text.partition("=")[0]
        raise ArgumentTypeError(f"{name!r} is given with a value or is not a name; expected NAME without a value")
    return text


def _directive(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ArgumentTypeError(
            f"{text!r} is not a directive; expected the rest of a line after #SBATCH, #PBS or #BSUB"
        )
    return text


_image = _word(r"(?!-)[^\x00-\x1f\x7f]+", "is not an image; expected a name or a path, not starting with a dash")
_mount = _word("/[^:]*:/[^:]*(:ro)?", "is not a mount; expected SRC:DST or SRC:DST:ro with absolute paths")
_chunk = _word("[A-Za-z][A-Za-z0-9_]*=[A-Za-z0-9_.+-]+", "is not a resource of PBS; expected NAME=VALUE")


def _resource(text: str) -> tuple[str, int]:
    """Return name and count of an extended resource of Kubernetes. Its name has a domain, which cpu and memory lack."""
    found = re.fullmatch(r"([a-z0-9][a-z0-9.-]*/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)=([1-9]\d{0,5})", text)
    if not found:
        raise ArgumentTypeError(f"{text!r} is not a resource of Kubernetes; expected DOMAIN/NAME=COUNT, as rdma/ib=1")
    if found[1] == "nvidia.com/gpu":
        raise ArgumentTypeError(f"{text!r}: GPUs are requested by --gpus-per-node {found[2]}")
    return found[1], int(found[2])


def _mib(text: str) -> int:
    """Return the MiB of ``400G``, ``400gb`` or ``512M``."""
    found = re.fullmatch("([0-9]{1,7})([MGT])(?:I?B)?", text.upper())
    if not found or not int(found[1]):
        raise ArgumentTypeError(f"{text!r} is not a size of memory; expected a number with M, G or T, such as 400G")
    return int(found[1]) << {"M": 0, "G": 10, "T": 20}[found[2]]


_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_s(text: str) -> int:
    """Return the seconds of ``2h``, ``1h30m`` or ``1:30:00``."""
    if re.fullmatch(r"(?:\d{1,5}[dhms])+", text):
        seconds = sum(int(part[:-1]) * _UNITS_S[part[-1]] for part in re.findall(r"\d+[dhms]", text))
    elif found := re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text):
        seconds = sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS_S.values(), strict=True))
    else:
        raise ArgumentTypeError(f"{text!r} is not a time; expected 2h, 1h30m or 1:30:00")
    if not seconds:
        raise ArgumentTypeError(f"{text!r} is too short; expected a time above 0")
    return seconds


def parser() -> Parser:
    """Return the parser of the options."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "hvdtrain launch [OPTIONS] [-- ARGS]"
    made = Parser(prog="hvdtrain launch", usage=usage, description=_DESCRIPTION, formatter_class=raw)
    add = made.add_argument
    targets = [AUTO, OWN, *TARGETS]
    launcher = f"launcher of the ranks: {', '.join(targets)} (default: auto, chosen by what is installed)"
    add("--to", choices=targets, default=AUTO, metavar="TARGET", help=launcher)
    site = "profile of the site: a name, a file, or none (default: the first that matches this host name, if any)"
    add("--site", metavar="NAME", help=site)
    ranks = (
        "number of ranks; an elastic job starts with N or more, or with MIN after --start-timeout (default: one per"
        " slot of -H, or one per GPU of --gpus-per-node)"
    )
    add("-np", "-n", type=positive, metavar="N", help=ranks)
    which = made.add_mutually_exclusive_group()
    hosts = "hosts and their slots; schedulers use only the counts (default: this host)"
    which.add_argument("-H", dest="hosts", metavar="a:2,b:2", help=hosts)
    script = "program that prints the available hosts, a line host:slots each; runs every second"
    which.add_argument("--discover", type=local, metavar="SCRIPT", help=script)
    interface = "network interface between hosts (default: the launcher's choice; detected by hvdtrain's own driver)"
    add("--interface", type=_interface, default="", metavar="NAME", help=interface)
    add_ssh(add)
    passed = "pass this variable to ranks on other hosts; its value is never written to a file or a command line"
    add("--env", action="append", type=_variable, default=[], metavar="NAME", help=passed)
    add("--dry-run", action="store_true", help="print what would run and exit")
    _add_own(made.add_argument_group("hvdtrain's own driver, over Gloo").add_argument)
    _add_scheduled(made.add_argument_group("schedulers").add_argument)
    _add_container(made.add_argument_group("containers").add_argument)
    arguments = "options of hvdtrain train, or a program: python script.py"
    add("arguments", nargs=argparse.REMAINDER, metavar="-- ARGS", help=arguments)
    return made


def add_ssh(add: Callable[..., object]) -> None:
    """Declare the options of ssh to other hosts."""
    port = "port of ssh on other hosts (default: from ssh's configuration)"
    add("--ssh-port", type=positive, metavar="PORT", help=port)
    option = "argument for ssh; may be repeated: --ssh-option=-i --ssh-option=KEY"
    add("--ssh-option", action="append", default=[], metavar="ARG", help=option)


def _add_own(add: Callable[..., object]) -> None:
    elastic = "continue with MIN to MAX ranks when ranks die or join (default: a dead rank ends the job)"
    add("--elastic", metavar="MIN:MAX", help=elastic)
    slots = "slots of a host that the --discover script prints without a number (default: 1)"
    add("--slots", type=positive, default=1, metavar="N", help=slots)
    restarts = "restart the job up to N times when no rank is left (default: 0)"
    add("--restarts", type=_whole, default=0, metavar="N", help=restarts)
    add("--reset-limit", type=_whole, metavar="N", help="fail after N changes of membership (default: no limit)")
    seconds = {"type": _seconds, "metavar": "S"}
    hang = "kill a rank that blocks the others for S seconds, or for 10 x S if it still computes; 0 means never"
    add("--hang-timeout", default=60.0, help=f"{hang} (default: 60)", **seconds)
    short = "wait S seconds when fewer than MIN ranks are left (default: 600)"
    add("--elastic-timeout", default=600.0, help=short, **seconds)
    start = "wait S seconds for N ranks, then start with MIN or more (default: 600)"
    add("--start-timeout", default=600.0, help=start, **seconds)
    unheard = "treat a rank as lost after S seconds without an answer (default: the larger of 10 and ranks / 8)"
    add("--gloo-timeout", type=positive, metavar="S", help=unheard)
    agents = f"program that starts agents on other hosts: {', '.join([AUTO, SSH, *JOBS])} (default: auto"
    agents += ", the scheduler's inside an allocation, else ssh)"
    add("--agents", choices=[AUTO, SSH, *JOBS], default=AUTO, metavar="PROGRAM", help=agents)
    add("--local", default="", metavar="NAMES", help="other names of this host, separated by commas")
    add("--events", type=local, metavar="FILE", help="append the events of the job to FILE, as JSON lines")
    add("--tag", action="store_true", help="also mark the lines of rank 0 with its number")


def _add_scheduled(add: Callable[..., object]) -> None:
    add("--nodes", type=positive, metavar="N", help="number of hosts (default: those of -H, or 1)")
    add("--gpus-per-node", type=positive, metavar="N", help="GPUs per host, one per rank (default: none)")
    cores = "cores per rank (default: the site's; with GPUs, all cores of the hosts, which nobody else can use then)"
    add("--cpus-per-rank", type=positive, metavar="N", help=cores)
    add("--mem", type=_mib, metavar="SIZE", help="memory per host, such as 400G or 512M (default: the site's)")
    chunk = "another resource of each host of PBS, such as host_type=a100"
    add("--chunk", action="append", type=_chunk, default=[], metavar="NAME=VALUE", help=chunk)
    limit = "time limit of the job, such as 2h, 1h30m or 1:30:00 (default: the site's)"
    add("--time", type=duration_s, metavar="T", help=limit)
    add("--queue", type=_plain, metavar="NAME", help="partition or queue (default: the site's)")
    add("--account", type=_plain, metavar="NAME", help="account to charge (default: yours)")
    add("--name", type=_name, default="hvdtrain", help="name of the job (default: hvdtrain)")
    notice = "save this long before the time limit, such as 90s, 2m or 0:02:00 (default: 2m)"
    add("--notice", type=duration_s, default=120, metavar="T", help=notice)
    requeues = "requeue the job up to N times (default: 20 for training by Slurm and Kubernetes, else 0)"
    add("--requeues", type=_whole, metavar="N", help=requeues)
    check = "check the hosts before the ranks start, by hvdtrain preflight; requeue without bad hosts"
    add("--preflight", action=BooleanOptionalAction, default=False, help=check)
    pmi = "how srun connects the ranks of an MPI, such as pmix_v4; none for our driver (default: by srun --mpi=list)"
    add("--pmi", type=_name_of_pmi, metavar="KIND", help=pmi)
    of_starter = "another argument of srun or mpirun, such as --cpu-bind=verbose; may be repeated"
    add("--launcher-arg", action="append", default=[], metavar="ARG", help=of_starter)
    directive = "another directive for the scheduler, such as --qos=high"
    add("--directive", action="append", type=_directive, default=[], metavar="D", help=directive)
    add("--image", type=_plain, metavar="NAME", help="container image (default: hvdtrain:cuda or hvdtrain:cpu)")
    resource = "another resource of each worker pod of Kubernetes, such as rdma/ib=1; may be repeated"
    add("--resource", action="append", type=_resource, default=[], metavar="NAME=COUNT", help=resource)
    add("--namespace", type=_plain, metavar="NAME", help="Kubernetes namespace (default: the current one)")


def _add_container(add: Callable[..., object]) -> None:
    image = "run each rank in this container image, with the image's Python; none for no container (default: none)"
    add("--container", type=lambda text: "" if text == "none" else _image(text), metavar="IMAGE", help=image)
    mount = "mount a folder of the hosts in the container, besides the working folder; may be repeated"
    add("--container-mount", action="append", type=_mount, default=[], metavar="SRC:DST[:ro]", help=mount)
    runtimes = [AUTO, PYXIS, APPTAINER]
    runtime = f"what starts containers: {', '.join(runtimes)} (default: auto, chosen by what is installed)"
    add("--container-runtime", choices=runtimes, default=AUTO, metavar="NAME", help=runtime)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of launch; `arguments` is everything from ``--`` on.

    Errors: LaunchError: unknown option; the message suggests a known one.
    """
    made, options = parser(), argparse.Namespace()
    _, unknown = made.parse_known_args(argv, options)
    if unknown:
        raise _no_option(unknown[0].partition("=")[0], made)
    return options


def given(options: argparse.Namespace) -> list[str]:
    """Return the names of the options with another value than the default."""
    kept = {action.dest: action.default for action in parser()._actions}
    return [name for name, value in vars(options).items() if name != "arguments" and value != kept.get(name)]


def _no_option(option: str, made: Parser) -> LaunchError:
    option = declared_spelling(option, _OF_HOROVODRUN)
    if option in _OF_HOROVODRUN:
        next_step = f"use {_OF_HOROVODRUN[option]} instead of {option}"
    elif option.lstrip("-").partition(".")[0] in _OF_TRAINING:
        return LaunchError(f"{option} is an option of training, not of launch.", next_step=AFTER_DASHES)
    else:
        near = made.nearest_option(option)
        next_step = f"did you mean {near}? Else: {AFTER_DASHES}" if near else f"see {made.prog} --help; {AFTER_DASHES}"
    return LaunchError(f"there is no option {option} of launch.", next_step=next_step)
