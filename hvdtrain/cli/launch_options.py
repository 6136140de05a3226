"""Reading the options of ``hvdtrain launch``, and what one that does not exist is answered with."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from hvdtrain.cli.launch_parser import parser
from hvdtrain.cli.parser import Parser
from hvdtrain.config.schema import Config
from hvdtrain.config.spelling import declared_spelling
from hvdtrain.errors import LaunchError

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

BEHIND = "options of training come behind --, as in: hvdtrain launch -np 2 -- --train.steps 100"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options of launch; `arguments` is what follows them, from ``--`` on.

    Errors:
        LaunchError: an option that does not exist, with what was likely meant.
    """
    made = parser()
    options, unknown = made.parse_known_args(argv)
    if unknown:
        raise _no_option(unknown[0].partition("=")[0], made)
    return options


def given(options: argparse.Namespace) -> list[str]:
    """Names of the options that were given another value than the default."""
    kept = {action.dest: action.default for action in parser()._actions}
    return [name for name, value in vars(options).items() if name != "arguments" and value != kept.get(name)]


def _no_option(option: str, made: Parser) -> LaunchError:
    option = declared_spelling(option, _OF_HOROVODRUN)
    if option in _OF_HOROVODRUN:
        next_step = f"{_OF_HOROVODRUN[option]} is what {option} of horovodrun is here"
    elif option.lstrip("-").partition(".")[0] in _OF_TRAINING:
        return LaunchError(f"{option} is an option of training, not of launch.", next_step=BEHIND)
    else:
        near = made.nearest_option(option)
        next_step = f"did you mean {near}? Else: {BEHIND}" if near else f"see hvdtrain launch --help; {BEHIND}"
    return LaunchError(f"there is no option {option} of launch.", next_step=next_step)
