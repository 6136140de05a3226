"""Read the options of ``hvdtrain launch``, and suggest the right one for an unknown option."""

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
    "--np": "-np N",
    "--num-proc": "-np N",
    "--hosts": "-H a:2,b:2",
    "--host-discovery-script": "--discover SCRIPT",
    "--network-interface": "--interface IF",
    "--network-interfaces": "--interface IF",
}
"""Options of horovodrun, and the options of launch that replace them."""

_OF_TRAINING = {"config", "print_config", *(field.name for field in dataclasses.fields(Config))}
"""First parts of the names of the options of ``hvdtrain train``."""

AFTER_DASHES = "options of training follow --, as in: hvdtrain launch -np 2 -- --train.steps 100"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of launch; `arguments` is everything from ``--`` on.

    Errors:
        LaunchError: unknown option; the message suggests a known one.
    """
    made = parser()
    options, unknown = made.parse_known_args(argv)
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
        next_step = (
            f"did you mean {near}? Else: {AFTER_DASHES}" if near else f"see hvdtrain launch --help; {AFTER_DASHES}"
        )
    return LaunchError(f"there is no option {option} of launch.", next_step=next_step)
