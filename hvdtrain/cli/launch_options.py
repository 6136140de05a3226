"""The options of ``hvdtrain launch``, and what one that does not exist is answered with."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.config.schema import Config
from hvdtrain.errors import LaunchError

_DESCRIPTION = """\
Start training on several ranks, and keep it going while ranks and hosts come and go:
a rank that dies is started again, and the others go on without waiting for it."""

_OF_HOROVODRUN = {
    "--min-np": "--elastic MIN:MAX",
    "--max-np": "--elastic MIN:MAX",
    "--min-num-proc": "--elastic MIN:MAX",
    "--max-num-proc": "--elastic MIN:MAX",
    "--num-proc": "-np N",
    "--hosts": "-H a:2,b:2",
    "--host-discovery-script": "--discover SCRIPT",
    "--network-interface": "--interface IF",
    "--network-interfaces": "--interface IF",
}
"""What stands here for the options of horovodrun."""

_OF_TRAINING = {"config", "print_config", *(field.name for field in dataclasses.fields(Config))}
"""The first parts of the names of options of ``hvdtrain train``."""

_BEHIND = "options of training come behind --, as in: hvdtrain launch -np 2 -- --train.steps 100"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options of launch; `arguments` is what follows them, from ``--`` on.

    Errors:
        LaunchError: an option that does not exist, with what was likely meant.
    """
    made = parser()
    options, unknown = made.parse_known_args(argv)
    if unknown:
        known = [name for action in made._actions for name in action.option_strings if name.startswith("--")]
        raise _no_option(unknown[0].partition("=")[0], known)
    return options


def _no_option(option: str, known: Sequence[str]) -> LaunchError:
    if option in _OF_HOROVODRUN:
        next_step = f"{_OF_HOROVODRUN[option]} is what {option} of horovodrun is here"
    elif option.lstrip("-").partition(".")[0] in _OF_TRAINING:
        return LaunchError(f"{option} is an option of training, not of launch.", next_step=_BEHIND)
    else:
        near = difflib.get_close_matches(option, known, n=1)
        next_step = f"did you mean {near[0]}? Else: {_BEHIND}" if near else f"see hvdtrain launch --help; {_BEHIND}"
    return LaunchError(f"there is no option {option} of launch.", next_step=next_step)


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


def parser() -> argparse.ArgumentParser:
    """Declare the options."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="hvdtrain launch", description=_DESCRIPTION, formatter_class=raw)
    add = made.add_argument
    ranks = "ranks to start with, at least: up to MAX of --elastic where they are ready by then"
    add("-np", type=_positive, required=True, metavar="N", help=ranks)
    add("--elastic", metavar="MIN:MAX", help="go on with MIN to MAX ranks; without it a rank that dies ends the job")
    which = made.add_mutually_exclusive_group()
    which.add_argument("-H", dest="hosts", metavar="a:2,b:2", help="hosts and their slots (this host)")
    script = "program that writes host:slots lines; asked each second"
    which.add_argument("--discover", type=Path, metavar="SCRIPT", help=script)
    add("--restarts", type=_whole, default=0, metavar="N", help="start all again N times when no rank was left (0)")
    add("--reset-limit", type=_whole, metavar="N", help="end with an error after N changes of the ranks (no limit)")
    _add_times(add)
    add("--interface", type=_interface, default="", help="network interface between hosts (found out)")
    add("--local", default="", metavar="NAMES", help="further names of this host, with commas")
    add("--ssh-port", type=_positive, metavar="PORT", help="of ssh to other hosts (as ssh is set up)")
    add("--ssh-option", action="append", default=[], metavar="ARG", help="an argument for ssh; may be repeated")
    add("--env", action="append", default=[], metavar="NAME", help="a variable that ranks on other hosts get too")
    add("--events", type=Path, metavar="FILE", help="append what happens to FILE, as lines of JSON")
    add("--tag", action="store_true", help="mark lines of rank 0 by its number too")
    add("--dry-run", action="store_true", help="print what would be run, and stop")
    add("arguments", nargs=argparse.REMAINDER, metavar="-- ARGS", help="arguments of hvdtrain train")
    return made


def _add_times(add: Callable[..., object]) -> None:
    seconds = {"type": _seconds, "metavar": "S"}
    add(
        "--hang-timeout",
        default=60.0,
        help="end a rank that holds the others up for S seconds; 0: never (60)",
        **seconds,
    )
    add("--elastic-timeout", default=600.0, help="with fewer than MIN ranks wait S seconds (600)", **seconds)
    add("--start-timeout", default=600.0, help="wait S seconds for N ranks, then go on with MIN (600)", **seconds)
    add("--gloo-timeout", type=_positive, default=10, metavar="S", help="give up a rank that is not heard of (10)")
