"""A rank that a fault befalls at a given place of its training: ``python chaos_rank.py ORDER PACE_S ARGUMENTS...``.

ORDER is a JSON file {"fault", "phase", "step", "rank", "folder"}; the process that comes to the place first renames it
to ORDER.done, and no other does it again. `FAULTS` that a rank cannot do to itself are left to who reads that file.
PACE_S: seconds that each step takes longer, for as long as there is no file ORDER.fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
FAULTS = (*SIGNALS, "link cut", "disk full")
EXCEPTION = "exception"
"""A fault that is not of the matrix: an error in the program."""
WRONG_BITS = "wrong bits"
"""Another one: an element of a gradient is another number, in one micro-batch."""

SPANS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "exchange": "wait",
    "step": "optimizer",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
}
"""Phases of training by the span that they are."""

MEETING = "meeting"
"""A phase that is not of the matrix: ranks are about to meet in a round, by its number in the place of a step."""

COPIES = "copies"
"""Another such phase: a commit whose copies a rank has, though not every rank may have them yet."""

PHASES = ("start-up", "data", "forward", "backward", "exchange", "step", "commit", "checkpoint", "evaluation")
BALLAST = "ballast"


class Order:
    """What is to happen where.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            self.facts = json.loads(path.read_text())

    def come_to(self, phase: str, step: int, rank: int | None = None) -> None:
        """This rank is at a place."""
        facts = self.facts
        rank = int(os.environ["HOROVOD_RANK"]) if rank is None else rank
        if not facts or (phase, rank) != (facts["phase"], facts["rank"]):
            return
        if phase != "start-up" and step < facts["step"]:
            return
        self.facts = {}
        try:
            self.path.rename(f"{self.path}.done")
        except FileNotFoundError:  # another process was faster
            return
        self._strike(facts)

    @staticmethod
    def _strike(facts: dict[str, Any]) -> None:
        if facts["fault"] in SIGNALS:
            os.kill(os.getpid(), signal.Signals[facts["fault"]])
        elif facts["fault"] == EXCEPTION:
            raise ValueError("as it was ordered")
        elif facts["fault"] == WRONG_BITS:
            _change_a_gradient()
        elif facts["fault"] == "disk full":
            with suppress(OSError), Path(facts["folder"], BALLAST).open("wb", buffering=0) as ballast:
                while ballast.write(bytes(1 << 16)):
                    pass


def _change_a_gradient() -> None:
    from hvdtrain.exchange import in_order

    right = in_order.as_leaf

    def wrong(gradient: Any) -> Any:
        in_order.as_leaf = right
        leaf = right(gradient).clone()
        leaf.view(-1)[0] += 1.0
        return leaf

    in_order.as_leaf = wrong


def _before(owner: type, name: str, act: Callable[..., None]) -> None:
    """Let `act` come before a method, with its arguments."""
    method = getattr(owner, name)

    def both(*arguments: Any, **keywords: Any) -> Any:
        act(*arguments)
        return method(*arguments, **keywords)

    setattr(owner, name, both)


def main(argv: list[str]) -> int:
    """Train."""
    order, pace_s, fast = Order(Path(argv[0])), float(argv[1]), Path(f"{argv[0]}.fast")
    order.come_to("start-up", 0)
    from hvdtrain import spans
    from hvdtrain.comm.rounds import DriverRounds
    from hvdtrain.state.buddies import Buddies
    from hvdtrain.state.snapshot import Snapshot

    phases = {span: phase for phase, span in SPANS.items()}
    recorder = spans._Span

    def entered(span: Any) -> None:
        if span.name in phases:
            order.come_to(phases[span.name], span._recorder.step)
        if span.name == SPANS["step"] and not fast.exists():
            time.sleep(pace_s)

    _before(recorder, "__enter__", entered)
    _before(DriverRounds, "_meet", lambda rounds, place: order.come_to(MEETING, place.round, place.rank))
    _before(Buddies, "agree", lambda buddies: order.come_to(COPIES, buddies._progress.__self__.step))
    _before(Snapshot, "capture", lambda snapshot, state, step: order.come_to("commit", step))
    from hvdtrain.__main__ import main as train

    return train(argv[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
