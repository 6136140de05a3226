"""All errors that a user can cause.

::

    HvdtrainError
    ├── TaskError            └── CallOrderError, JoinedError
    ├── DataError            └── TransientDataError
    ├── LaunchError          └── UnreachableError
    ├── RunDirectoryError    └── UnusableRunDirectoryError
    ├── StoreError           └── UnreachableStoreError
    ├── CheckpointError      └── UnreadableCheckpointError, UnwrittenCheckpointError
    └── ConfigError, LostRankError, HorovodError, BuildError, LostStateError, TraceError, NonFiniteError, DriftError
"""

from __future__ import annotations

from collections.abc import Iterable

USAGE = 2
"""Exit code on an error that would recur, so launchers do not restart the job: see `exit_code`."""

BAD_HOSTS = 3
"""Exit code of ``hvdtrain preflight`` if hosts are bad, or do not answer."""

CANNOT_START = 127
"""Exit code if a program cannot be started, as in a shell."""

ETC = ", ..."


def listed(names: Iterable[object], most: int = 3, rest: str = " and {} more") -> str:
    """Join names, shortened as in ``a, b and 3 more``; with the `rest` ETC as in ``a, b, ...``."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (rest.format(len(texts) - most) if len(texts) > most else "")


class HvdtrainError(Exception):
    """An error with the expected and the found value, and what to do next.

    Args:
        what: the problem in one sentence.
        expected: a correct value or state.
        found: the actual value or state.
        next_step: the command or change that solves the problem.
        everywhere: every rank raises this same error, so that one rank reports it for all.
    """

    everywhere = False
    recurs = False  # the same command would fail again
    consequence = False  # it only reports an error of another rank, which that rank raises itself

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
        everywhere: bool = False,
    ) -> None:
        self.everywhere = everywhere or self.everywhere  # a class may say it for all its errors
        self.what = what
        self.expected = expected
        self.found = found
        self.next_step = next_step
        labelled = {"expected": expected, "found": found, "next": next_step}
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in labelled.items() if text)]))


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends by this error."""
    return USAGE if getattr(error, "recurs", False) or isinstance(error, SyntaxError | ImportError) else 1


class ConfigError(HvdtrainError, ValueError):
    """An option or a config file is wrong."""

    everywhere = recurs = True


class TaskError(HvdtrainError):
    """A task function cannot be loaded, or returned or raised something wrong."""

    recurs = True


class CallOrderError(TaskError, AssertionError):
    """The methods of a distributed optimizer, or backward, were called in the wrong order.

    Also an AssertionError, which Horovod's own optimizer raises.
    """


class JoinedError(TaskError):
    """A rank has called Horovod's join. It takes part in sums, but in no other exchange."""

    everywhere = True


class DataError(HvdtrainError):
    """Data is missing, empty or unreadable."""

    recurs = True


class TransientDataError(DataError):
    """A process that loads data died, or the disk for prepared data is full."""

    recurs = False


class LaunchError(HvdtrainError):
    """The ranks of the job do not match: launcher, MPI or world size."""

    recurs = True


class UnreachableError(LaunchError):
    """A host, or a store where ranks meet, does not answer."""

    recurs = False


class LostRankError(HvdtrainError):
    """A collective of torch.distributed failed, because another rank is lost."""

    consequence = True


class HorovodError(HvdtrainError):
    """Horovod is missing, or built for another torch or MPI."""

    recurs = True


class BuildError(HvdtrainError):
    """Building Horovod failed."""


class RunDirectoryError(HvdtrainError):
    """A run directory cannot be used."""


class UnusableRunDirectoryError(RunDirectoryError):
    """A run directory would be rejected again: it is not writable, or holds a run that must not change."""

    recurs = True


class StoreError(HvdtrainError):
    """A store behind a URL cannot be used, such as without permission."""

    recurs = True


class UnreachableStoreError(StoreError):
    """A store behind a URL does not answer, or fails."""

    recurs = False


class CheckpointError(HvdtrainError):
    """A checkpoint cannot be read, or does not match the model."""

    recurs = True


class UnreadableCheckpointError(CheckpointError):
    """The files of a checkpoint cannot be opened, such as without permission. It may be complete, so it is kept."""

    recurs = False


class UnwrittenCheckpointError(CheckpointError):
    """A checkpoint cannot be written, because the disk is full or damaged."""

    recurs = False


class LostStateError(HvdtrainError):
    """A part of the training's state was only in the memory of lost ranks."""

    everywhere = True


class TraceError(HvdtrainError):
    """A trace cannot be read, or is of another kind."""


class NonFiniteError(HvdtrainError):
    """Loss or gradient was inf or nan too many times in a row."""

    everywhere = recurs = True


class DriftError(HvdtrainError):
    """Parameters differ between ranks."""

    everywhere = True
