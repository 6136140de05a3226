"""The options of ``hvdtrain launch``, declared."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from hvdtrain.cli.parser import Parser
from hvdtrain.launch.choose import AUTO, OWN
from hvdtrain.launch.targets import TARGETS

_DESCRIPTION = """\
Start training, or any program, on several ranks: by the MPI or the scheduler that is here, or by our own driver, which
keeps it going while ranks and hosts come and go. --dry-run shows what would run."""


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"a number of seconds from 0, not {text}")
    return number


def _whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(f"a whole number from 0, not {text}")
    return int(text)


def _positive(text: str) -> int:
    if not _whole(text):
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _interface(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.@:-]{0,15}", text):
        raise argparse.ArgumentTypeError(f"a network interface, such as eth0, not {text!r}")
    return text


def _variable(text: str) -> str:
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"the name of a variable, without its value: not {text.partition('=')[0]!r}")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", text):  # pods' names begin with it: RFC 1035
        raise argparse.ArgumentTypeError(f"up to 40 small letters, digits and -, a letter first, not {text!r}")
    return text


def _plain(text: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise argparse.ArgumentTypeError(f"a word without spaces, not {text!r}")
    return text


def _directive(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise argparse.ArgumentTypeError(f"what stands behind #SBATCH, #PBS or #BSUB on one line, not {text!r}")
    return text


def _array(text: str) -> str:
    if not re.fullmatch(r"\d{1,6}-\d{1,6}", text) or len({*map(int, text.split("-"))}) < 2:
        raise argparse.ArgumentTypeError(f"first and last index, such as 0-3, not {text!r}")
    return text


_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_s(text: str) -> int:
    """Read ``2h``, ``1h30m`` or ``1:30:00``, in seconds."""
    if re.fullmatch(r"(?:\d{1,5}[dhms])+", text):
        seconds = sum(int(part[:-1]) * _UNITS_S[part[-1]] for part in re.findall(r"\d+[dhms]", text))
    elif found := re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text):
        seconds = sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS_S.values(), strict=True))
    else:
        raise argparse.ArgumentTypeError(f"a time such as 2h, 1h30m or 1:30:00, not {text!r}")
    if not seconds:
        raise argparse.ArgumentTypeError("a time above 0")
    return seconds


def parser() -> Parser:
    """Declare the options."""
    raw = argparse.RawDescriptionHelpFormatter
    made = Parser(prog="hvdtrain launch", description=_DESCRIPTION, formatter_class=raw)
    add = made.add_argument
    add("--to", choices=[AUTO, OWN, *TARGETS], default=AUTO, help="what starts the ranks (what fits this machine)")
    ranks = "ranks; of an elastic job at least, up to MAX where they are ready by then (one a slot or GPU)"
    add("-np", "-n", type=_positive, metavar="N", help=ranks)
    which = made.add_mutually_exclusive_group()
    hosts = "hosts and their slots; of schedulers the counts alone (this host)"
    which.add_argument("-H", dest="hosts", metavar="a:2,b:2", help=hosts)
    script = "program that writes host:slots lines; asked each second"
    which.add_argument("--discover", type=Path, metavar="SCRIPT", help=script)
    add_network(add)
    passed = "a variable that ranks on other hosts get too; its value is never written down"
    add("--env", action="append", type=_variable, default=[], metavar="NAME", help=passed)
    add("--dry-run", action="store_true", help="print what would be run, and stop")
    _add_own(made.add_argument_group("our own driver, over Gloo").add_argument)
    _add_scheduled(made.add_argument_group("schedulers").add_argument)
    add(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="-- ARGS",
        help="options of hvdtrain train, or a program: python script.py",
    )
    return made


def add_network(add: Callable[..., object]) -> None:
    """Declare by which interface and how by ssh other hosts are reached."""
    add("--interface", type=_interface, default="", help="network interface between hosts (found out)")
    add("--ssh-port", type=_positive, metavar="PORT", help="of ssh to other hosts (as ssh is set up)")
    add("--ssh-option", action="append", default=[], metavar="ARG", help="an argument for ssh; may be repeated")


def _add_own(add: Callable[..., object]) -> None:
    add("--elastic", metavar="MIN:MAX", help="go on with MIN to MAX ranks; without it a rank that dies ends the job")
    add("--slots", type=_positive, default=1, metavar="N", help="of hosts that SCRIPT names without a number (1)")
    add("--restarts", type=_whole, default=0, metavar="N", help="start all again N times when no rank was left (0)")
    add("--reset-limit", type=_whole, metavar="N", help="end with an error after N changes of the ranks (no limit)")
    seconds = {"type": _seconds, "metavar": "S"}
    add(
        "--hang-timeout",
        default=60.0,
        help="end a rank that holds the others up for S seconds, or 10 x S if it computes; 0: never (60)",
        **seconds,
    )
    add("--elastic-timeout", default=600.0, help="with fewer than MIN ranks wait S seconds (600)", **seconds)
    add("--start-timeout", default=600.0, help="wait S seconds for N ranks, then go on with MIN (600)", **seconds)
    unheard = "give up a rank that is not heard of for S seconds (10; of more than 80 ranks an eighth of their number)"
    add("--gloo-timeout", type=_positive, metavar="S", help=unheard)
    add("--local", default="", metavar="NAMES", help="further names of this host, with commas")
    add("--events", type=Path, metavar="FILE", help="append what happens to FILE, as lines of JSON")
    add("--tag", action="store_true", help="mark lines of rank 0 by its number too")


def _add_scheduled(add: Callable[..., object]) -> None:
    add("--nodes", type=_positive, metavar="N", help="hosts (as many as -H names, or 1)")
    add("--gpus-per-node", type=_positive, metavar="N", help="GPUs of each host, one a rank (none)")
    add("--cpus-per-rank", type=_positive, metavar="N", help="cores of each rank (the site's)")
    add("--time", type=duration_s, metavar="2h", help="limit of the job's time (the site's)")
    add("--queue", type=_plain, metavar="NAME", help="partition or queue (the site's)")
    add("--account", type=_plain, metavar="NAME", help="who pays (yours)")
    add("--name", type=_name, default="hvdtrain", help="of the job (hvdtrain)")
    add("--array", type=_array, metavar="0-3", help="a job for each index; {array} in ARGS becomes the index")
    add("--notice", type=duration_s, default=120, metavar="2m", help="save so long before the limit (2m)")
    requeues = "go back into the queue N times at most (20; 0 where -- names a program)"
    add("--requeues", type=_whole, metavar="N", help=requeues)
    add("--directive", action="append", type=_directive, default=[], metavar="D", help="a further line: --qos=high")
    add("--image", type=_plain, help="what containers run (hvdtrain:cuda or hvdtrain:cpu)")
    add("--namespace", type=_plain, help="of Kubernetes (the current)")
