"""Every error that a user can cause.

::

    HvdtrainError
    ├── ConfigError          an option or a config file
    ├── TaskError            what a task function returned or raised
    │   ├── CallOrderError   backward, step and so on were called in an order that cannot be right
    │   └── JoinedError      a rank has called Horovod's join, and more than sums is to be exchanged
    ├── DataError            data that is missing, empty or unreadable
    ├── LaunchError          ranks that do not fit together: launcher, MPI, size
    ├── HorovodError         Horovod is missing, or built for something else
    ├── BuildError           building Horovod did not succeed
    ├── RunDirectoryError    a run directory that cannot be used
    │   └── UnusableRunDirectoryError  nor could it be the next time
    ├── CheckpointError      a checkpoint that cannot be read or does not fit
    │   └── UnreadableCheckpointError  one that may be whole: its files cannot be opened
    ├── TraceError           a trace that cannot be read, or is another program's
    ├── NonFiniteError       loss or gradient kept being inf or nan
    └── DriftError           parameters are not equal on all ranks
"""

from __future__ import annotations

USAGE = 2
"""What the command exits with on a `ConfigError`, a `TaskError`, an `UnusableRunDirectoryError` or a SyntaxError.

They would come again each time: nothing that started them tries it again.
"""

CANNOT_START = 127
"""What a shell says of a program that cannot be started, and so do we."""


class HvdtrainError(Exception):
    """What went wrong, what was expected, what was found, what to do next.

    Args:
        what: one sentence naming the thing that is wrong.
        expected: what would have been right.
        found: what was there instead.
        next_step: the command or the change that mends it.

    Attributes:
        everywhere: every rank raises this same error, so that one of them may speak for all.
    """

    everywhere = False

    def __init__(
        self, what: str, *, expected: str | None = None, found: str | None = None, next_step: str | None = None
    ) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.next_step = next_step
        parts = [what]
        parts += [f"  {label}: {text}" for label, text in self._labelled() if text]
        super().__init__("\n".join(parts))

    def _labelled(self) -> list[tuple[str, str | None]]:
        return [("expected", self.expected), ("found", self.found), ("next", self.next_step)]


class ConfigError(HvdtrainError, ValueError):
    """An option or a config file is wrong."""

    everywhere = True


class TaskError(HvdtrainError):
    """A task function cannot be loaded, or returned the wrong thing."""


class CallOrderError(TaskError, AssertionError):
    """The methods of a distributed optimizer, or backward, were called in an order that cannot be right.

    An AssertionError too, as Horovod's own optimizer raises.
    """


class JoinedError(TaskError):
    """A rank has called Horovod's join: it takes part in sums, and in no other exchange."""

    everywhere = True


class DataError(HvdtrainError):
    """Data is missing, empty or unreadable."""


class LaunchError(HvdtrainError):
    """The ranks of the job do not fit together."""


class HorovodError(HvdtrainError):
    """Horovod is missing, or was built for another torch or MPI."""


class BuildError(HvdtrainError):
    """Horovod could not be built."""


class RunDirectoryError(HvdtrainError):
    """A run directory cannot be used."""


class UnusableRunDirectoryError(RunDirectoryError):
    """A run directory that would be refused again: none that can be written, or one with a run to be left alone."""


class CheckpointError(HvdtrainError):
    """A checkpoint cannot be read, or does not fit the model."""


class UnreadableCheckpointError(CheckpointError):
    """The files of a checkpoint cannot be opened, for want of permission, say: it may be whole, and stays as it is."""


class TraceError(HvdtrainError):
    """A trace cannot be read, or is not of the kind that is wanted."""


class NonFiniteError(HvdtrainError):
    """Loss or gradient was not finite too many times in a row."""

    everywhere = True


class DriftError(HvdtrainError):
    """Parameters are not equal on all ranks."""

    everywhere = True
