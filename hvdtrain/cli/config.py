"""``hvdtrain config init``: write a file with all options of training, to edit and pass to ``--config``."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdtrain.cli.completion import TASK_HELP
from hvdtrain.cli.parser import Parser, local, run_group
from hvdtrain.errors import ConfigError

_ABOUT = "write a YAML file with all options of training, their descriptions and defaults"
COMMANDS = {"init": _ABOUT}


def main(argv: list[str]) -> int:
    """Run a command of this group. Return 0, 1 on an error, 2 on a wrong option."""
    return run_group("config", "[OPTIONS] [FILE]", COMMANDS, argv, _call)


def parser(name: str) -> Parser:
    """Declare the options of a command of this group."""
    made = Parser(prog=f"hvdtrain config {name}", description=f"{_ABOUT.capitalize().replace('yaml', 'YAML')}.")
    file = "new file (default: run.yaml)"
    made.add_argument("file", type=local, nargs="?", default=Path("run.yaml"), metavar="FILE", help=file)
    made.add_argument("--task", metavar="TASK", help=TASK_HELP)
    return made


def _call(name: str, argv: list[str]) -> int:
    options = parser(name).parse_args(argv)
    file: Path = options.file
    if file.exists() or file.is_symlink():  # before loading the task, which takes seconds
        raise ConfigError(f"{file} exists already", next_step="name another file, or move this one away")

    from hvdtrain.config.options import list_options, to_yaml
    from hvdtrain.config.parse import make_parser
    from hvdtrain.config.schema import Config
    from hvdtrain.files import write_text
    from hvdtrain.task.base import load_task_function

    task = options.task or Config.task
    text = to_yaml(list_options(make_parser(load_task_function(task))), task)
    try:
        write_text(file, text)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", next_step="name another file") from None
    print(f"wrote {file}; to train with it: hvdtrain train --config {shlex.quote(str(file))}")
    return 0
