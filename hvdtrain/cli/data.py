"""``hvdtrain data prepare``: make the tokens of a language model's data before a job needs them."""

from __future__ import annotations

import logging
import sys

from hvdtrain.cli.parser import Parser

_DESCRIPTION = """\
Make the token ids of the language model's data on this host, into the cache
from which training reads them, so that a job with the same options of data
starts at once. All cores tokenize. After a kill, the same command continues."""
_EPILOG = """\
Options are those of hvdtrain train: --config FILE, --data.*, and --model.from
for its tokenizer; others have no effect.

examples:
  hvdtrain data prepare --data.text 'train/*.jsonl' --data.tokenizer tokenizer.json
  hvdtrain data prepare --config run.yaml
"""


def parser() -> Parser:
    """Declare what is not an option of train."""
    made = Parser(prog="hvdtrain data", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("action", choices=["prepare"], help="make the tokens")
    return made


def main(argv: list[str]) -> int:
    """Make the tokens. Return 0.

    Errors: ConfigError: the task is not the language model; those of `prepare_corpus`.
    """
    _, rest = parser().parse_known_args(argv)

    from rich.console import Console
    from rich.progress import Progress

    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.errors import ConfigError
    from hvdtrain.task.base import load_task_function
    from hvdtrain.task.corpus import prepare_corpus

    task = task_spec(rest)
    if task != "language_model":
        raise ConfigError(f"--task {task} has no text to prepare", expected="language_model")
    run = parse_argv(rest, load_task_function(task))
    logging.basicConfig(format="hvdtrain: %(message)s", stream=sys.stderr)
    logging.getLogger("hvdtrain").setLevel(run.config.log_level.upper())
    model, data = run.task_args["model"], run.task_args["data"]
    source = None
    if model.from_:
        from hvdtrain.task.saved_model import find_model  # takes seconds, because of torch

        source = find_model(model.from_, config=model.config)
    shows = sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not shows) as progress:
        bar = progress.add_task("tokenizing", total=1.0)

        def show(what: str, fraction: float | None, count: int, seconds: float) -> None:
            text = f"{what}: {count / 1e6:,.1f} million tokens, {count / max(seconds, 1e-9) / 1e6:.2f} million/s"
            progress.update(bar, description=text, completed=fraction)

        files = prepare_corpus(data, source.tokenizer() if source else None, show if shows else None)
    for name, file in files:
        note = f" ({file.note})" if file.note else ""
        print(f"{name}: {file.train:,} tokens to train on, {file.heldout:,} held out, in {file.path}{note}")
    return 0
