"""``hvdtrain replay``: repeat steps of a run on one rank with the same bits, or find where two runs part."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from functools import partial

from hvdtrain.cli.parser import Parser, local, positive
from hvdtrain.cli.verify import scratch_folder

_DESCRIPTION = """\
Repeat steps of a run that was trained with --train.reproducible bits, on one
rank of this machine, from its newest checkpoint before them; compare each
loss, gradient norm and position bit for bit. With two runs: find the first
step with other bits, and what else differs."""
_EPILOG = """\
examples:
  hvdtrain replay runs/NAME --step 1200
  hvdtrain replay runs/a runs/b

exit code: 0 if all bits are equal; 1 if not, or on an error
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain replay", description=_DESCRIPTION, epilog=_EPILOG)
    add = made.add_argument
    add("run", type=local, metavar="RUN", help="run folder; it is only read")
    add("other", type=local, nargs="?", metavar="OTHER", help="run folder to compare with, instead of a replay")
    add("--step", type=positive, metavar="N", help="last step to repeat (default: the last one of the run)")
    add("--json", action="store_true", help="print JSON")
    return made


def main(argv: list[str]) -> int:
    """Repeat or compare, print, and return the exit code."""
    options = parser().parse_args(argv)
    from hvdtrain.verify.replay import find_difference, replay

    if options.other is not None:
        found = find_difference(options.run, options.other)
    else:
        say = (lambda text: None) if options.json else partial(print, flush=True)
        with scratch_folder() as folder:
            found = replay(options.run, options.step, folder, say)  # an error names its output in the folder
        shutil.rmtree(folder)
    print(json.dumps(asdict(found)) if options.json else "\n".join(found.lines()))
    return int(found.step is not None)
