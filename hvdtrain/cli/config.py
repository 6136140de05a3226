"""``hvdtrain config init``: a file with all options of training, to be changed and given to ``--config``."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdtrain.cli.group import run
from hvdtrain.cli.parser import Parser
from hvdtrain.errors import ConfigError

COMMANDS = {"init": "write a YAML file of all options of training, each with its default and what it does"}


def main(argv: list[str]) -> int:
    """Run a command of this group; 0, 1 where an error came, 2 on a wrong option."""
    return run("config", "[FILE] [OPTIONS]", COMMANDS, argv, _call)


def parser(name: str) -> Parser:
    """Declare the options of a command of this group."""
    made = Parser(
        prog=f"hvdtrain config {name}",
        description="Write a YAML file of all options of training, each with its default and what it does.",
    )
    made.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=Path("run.yaml"),
        metavar="FILE",
        help="to write, a new one (run.yaml)",
    )
    made.add_argument(
        "--task", metavar="TASK", help="whose parameters it has too: NAME, file.py:function or module:function"
    )
    return made


def _call(name: str, argv: list[str]) -> int:
    options = parser(name).parse_args(argv)
    file: Path = options.file
    if file.exists() or file.is_symlink():  # before the task is loaded, which takes seconds
        raise ConfigError(
            f"{file} is there already, and is left as it is", next_step="name another file, or move this one away"
        )

    from hvdtrain.config.commented import to_yaml
    from hvdtrain.config.options import list_options
    from hvdtrain.config.parse import make_parser
    from hvdtrain.config.schema import Config
    from hvdtrain.durable import write_text
    from hvdtrain.task.base import load_task_function

    task = options.task or Config.task
    text = to_yaml(list_options(make_parser(load_task_function(task))), task)
    try:
        write_text(file, text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", next_step="name another file") from None
    print(f"written: {file}; train by it: hvdtrain train --config {shlex.quote(str(file))}")
    return 0
