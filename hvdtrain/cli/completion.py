"""``hvdtrain completion SHELL``: print a completion script for a shell. A TAB does not start Python."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hvdtrain.cli.parser import Parser, local

_SHELLS = ("bash", "zsh", "fish")

TASK_HELP = "include the parameters of this task: NAME, file.py:function or module:function (default: language_model)"
_EPILOG = """\
run once, and again after an update:
  bash   hvdtrain completion bash \\
           > ~/.local/share/bash-completion/completions/hvdtrain
         (without the package bash-completion: use any FILE, and add
         `source FILE` to ~/.bashrc)
  zsh    hvdtrain completion zsh > DIR/_hvdtrain
         (DIR: a folder in `echo $fpath`)
  fish   hvdtrain completion fish > ~/.config/fish/completions/hvdtrain.fish
"""
_BASH = """
# bash splits --option=value into three words. After launch -- come options of train.
_hvdtrain() {
  local words=() word i
  for ((i = 0; i <= COMP_CWORD; i++)); do
    word="${COMP_WORDS[i]}"
    if [[ $word == "=" ]]; then
      ((i < COMP_CWORD)) || words+=("")
    elif [[ $word == "--" && ${words[1]-} == launch ]] && ((i < COMP_CWORD)); then
      words=("${COMP_WORDS[0]}" train)
    else
      words+=("$word")
    fi
  done
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_hvdtrain "$@"
}
complete -o bashdefault -F _hvdtrain hvdtrain
"""
_ZSH = """
# After launch -- come options of train.
if (( CURRENT > 2 )) && [[ $words[2] == launch ]] && (( ${words[(i)--]} < CURRENT )); then
  (( CURRENT -= ${words[(i)--]} - 2 ))
  words=("$words[1]" train "${(@)words[${words[(i)--]} + 1,-1]}")
fi
"""


def main(argv: list[str]) -> int:
    """Print the script and return 0."""
    options = parser().parse_args(argv)

    from hvdtrain.config.schema import Config
    from hvdtrain.task.base import load_task_function

    print(script(options.shell, load_task_function(options.task or Config.task)))
    return 0


def parser() -> Parser:
    """Declare the options."""
    made = Parser(
        prog="hvdtrain completion",
        description="Print a script that lets a shell complete commands, options and their values.",
        epilog=_EPILOG,
    )
    made.add_argument("shell", choices=_SHELLS, help="shell to print the script for")
    made.add_argument("--task", metavar="TASK", help=TASK_HELP)
    return made


def script(shell: str, task_function: Callable[..., Any]) -> str:
    """Return the script of a shell, with the parameters of a task among the options of train."""
    import shtab

    whole = combined_parser(task_function)
    if shell == "zsh":
        return shtab.complete(whole, shell, preamble=_ZSH)
    return shtab.complete(whole, shell) + (_BASH if shell == "bash" else "")


def combined_parser(task_function: Callable[..., Any]) -> ArgumentParser:
    """Return one parser with all commands and options. Without a command, the options are those of train."""
    from hvdtrain.__main__ import COMMANDS

    training = [_training(task_function)]
    whole = ArgumentParser(prog="hvdtrain", parents=training, add_help=False, conflict_handler="resolve")
    whole.add_argument("-h", "--help", action="help", help="list all commands")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers()
    for name, (module, text) in COMMANDS.items():
        own = import_module(module)
        if name == "train":
            commands.add_parser(name, help=text, parents=[_training(task_function)], add_help=False)
        elif hasattr(own, "COMMANDS"):
            group = commands.add_parser(name, help=text).add_subparsers()
            for inner, about in own.COMMANDS.items():
                _add(group, inner, about, own.parser(inner))
        else:
            _add(commands, name, text, own.parser())
    return whole


def _add(place: Any, name: str, text: str, declared: ArgumentParser) -> None:
    """Add a command to its group, without what a shell would misread."""
    import shtab

    added = place.add_parser(name, help=text.replace("%", "%%"), parents=[declared], add_help=False)
    for action in list(added._actions):
        if action.nargs == argparse.REMAINDER:  # zsh would offer nothing else
            added._actions.remove(action)
        if action.type in (Path, local):
            action.complete = shtab.FILE
        if isinstance(action.metavar, str):
            action.metavar = action.metavar.replace(":", "_")  # zsh parses the text after a colon


def _training(task_function: Callable[..., Any]) -> ArgumentParser:
    import shtab

    from hvdtrain.config.options import list_options, plain_parser
    from hvdtrain.config.parse import make_parser

    made = plain_parser(list_options(make_parser(task_function)))
    for action in made._actions:
        if action.dest == "config":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return made
