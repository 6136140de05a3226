"""``hvdtrain data prepare``: make the tokens of a language model's data before a job needs them."""

from __future__ import annotations

import logging
import sys
import time

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

_EVERY_S = {True: 0.2, False: 10.0}
"""Seconds between two lines about the progress, on a terminal and elsewhere."""


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
    progress = _Progress()
    for name, file in prepare_corpus(data, source.tokenizer() if source is not None else None, progress.show):
        progress.end()
        note = f" ({file.note})" if file.note else ""
        print(f"{name}: {file.train:,} tokens to train on, {file.heldout:,} held out, in {file.path}{note}")
    return 0


class _Progress:
    """A line on stderr: on a terminal, one that changes."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = time.monotonic()
        self._is_open = False

    def show(self, what: str, fraction: float | None, count: int, seconds: float) -> None:
        """Show it, unless it has just been shown."""
        now = time.monotonic()
        if now - self._shown_s < _EVERY_S[self._is_terminal]:
            return
        self._shown_s, speed = now, count / max(seconds, 1e-9)
        bar = "" if fraction is None else f"  {'#' * int(20 * fraction):<20} {fraction:4.0%}"
        line = f"{what}{bar}  {count / 1e6:,.1f} million tokens, {speed / 1e6:.2f} million/s"
        sys.stderr.write(f"\r{line}\x1b[K" if self._is_terminal else f"hvdtrain: {line}\n")
        sys.stderr.flush()
        self._is_open = self._is_terminal

    def end(self) -> None:
        """End a line that changes."""
        if self._is_open:
            sys.stderr.write("\n")
            self._is_open = False
