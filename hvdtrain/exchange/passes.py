"""Which backward pass of a step is the last, so that its gradients can travel. Pure."""

from __future__ import annotations


class Passes:
    """Tells the last backward pass of a step from those before it.

    Args:
        count: backward passes of a step, counted by the gradients that come: the parameter that was reached most often
            says which pass it is. 0 where `announce` says that the next one is the last.

    Attributes:
        count: as given.
        last: whether the pass under way is the last.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._by_name: dict[str, int] = {}
        self._most = 0
        self.last = count == 1

    def begin(self) -> None:
        """Start a step."""
        self._by_name.clear()
        self._most = 0
        self.last = self.count == 1

    def announce(self) -> None:
        """The next pass is the last."""
        self.last = True

    def end(self) -> None:
        """No pass of this step is to come."""
        self.last = False

    def reached(self, name: str) -> bool:
        """A gradient has come to this parameter; whether that is one of the last pass."""
        if self.count > 1:
            number = self._by_name[name] = self._by_name.get(name, 0) + 1
            if number > self._most:
                self._most = number
                self.last = number >= self.count
        return self.last
