"""The C++ compiler that Horovod's build calls: the real one, with arguments that suit today's torch.

Run as a script by a two-line sh wrapper (`wrapper_text`), by ``python -I -S``: it must import nothing of ours.
Five things are changed. Horovod forces C++14 and bundles code that forces C++11, torch needs C++17 or later: the
last ``-std`` is ours. Newer compilers no longer include some standard headers by the way (horovod#3957). The run
paths of a shared library would name the environment it was built in, which may be gone when it runs; so do messages,
with the folder of the build. And some of what Horovod and Gloo do is done in another way, by headers that are included
before everything else where the sources are those that were read (`CHANGES`).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

QUIET_MARK = "hvdtrain-quiet-timeline"
"""Text in a library of Horovod's whose Timeline is written by a thread that sleeps while it has nothing to do."""

PROMPT_MARKS = ("hvdtrain-prompt-cycle", "hvdtrain-prompt-done", "hvdtrain-prompt-wait")
"""Texts in a library of Horovod's whose threads, where `HVDTRAIN_PROMPT` is set, wake as soon as there is something to
do and sleep until then."""

MENDED_MARKS = ("hvdtrain-told-pair", "hvdtrain-late-release", "hvdtrain-joined-cache")
"""Texts that our build leaves in Horovod's library, one for each fault that it fixes: ranks that wait for the rest of a
message get an error when its sender is lost; a shutdown does not deadlock with a thread that enqueues tensors; a rank
that has joined executes no cached allgather or alltoall."""


@dataclass(frozen=True)
class Change:
    """A header that is included before everything else where one source of Horovod's is compiled.

    Attributes:
        source: the end of its path.
        read: sha256 of the versions of it that were read; another is compiled as it is.
        header: beside this file; its first lines say what it changes, and why that is safe.
        mark: text that comes into the library where the header took effect, and only then.
    """

    source: str
    read: tuple[str, ...]
    header: str
    mark: str

    def applies(self, argument: str) -> bool:
        """Tell whether an argument of the compiler is this source, in a version that was read."""
        return argument.endswith(f"/{self.source}") and (
            hashlib.sha256(Path(argument).read_bytes()).hexdigest() in self.read
        )


# Horovod 0.28.1's. Of the Timeline: a thread of rank 0 writes what others put into a queue, looks whether it is to open
# or close a file, calls std::this_thread::yield and starts over; there is no other call of it. It holds no mutex then,
# and nobody waits for it but who opens or closes a file or shuts Horovod down, each asking every millisecond or once:
# with 10 ms of sleep they wait up to 20 ms longer. The queue has room for a million events: 10 ms do not fill it. A
# process that is killed, and a shutdown with a file still open, lose what came in the last 10 ms. (With 1 ms of sleep
# it took 1.3% of a core.)
CHANGES = (
    Change(
        "horovod/common/timeline.cc",
        ("00fd3e4125bdc92e80e59a6e3b1a3227fd53b6f82edd87a93c21141d01c88e74",),
        "quiet_timeline.h",
        QUIET_MARK,
    ),
    Change(
        "horovod/common/operations.cc",
        ("0131aebee083cbd79e5a1c8bedd0f644faf5dd45df4e91bcb765ae46c436baf4",),
        "prompt_cycle.h",
        PROMPT_MARKS[0],
    ),
    Change(
        "horovod/torch/handle_manager.cc",
        ("58192ce7b38b3f822f5673784d9d44d491f3365c59434b4d15b76ae59f9c436c",),
        "prompt_done.h",
        PROMPT_MARKS[1],
    ),
    Change(
        "horovod/torch/mpi_ops_v2.cc",
        ("e33c17c9ce12de8d02d38473af8a042da3a591c3dc63da55d5247d3d28f6100d",),
        "prompt_wait.h",
        PROMPT_MARKS[2],
    ),
    Change(
        "gloo/transport/tcp/pair.cc",
        ("7abd292c5c927a4258f0f00a2a627264d24d4adaa724c81dd56208397aac0d93",),
        "told_pair.h",
        MENDED_MARKS[0],
    ),
    Change(
        "horovod/common/tensor_queue.cc",
        ("da59b96d10291ec14f46f46fed81bfebf7e8f9c3a4817102c2b745a6a0e31fd0",),
        "late_release.h",
        MENDED_MARKS[1],
    ),
    Change(
        "horovod/common/controller.cc",
        ("310cac98ca6b97c942e7199fcdeac1ed4acf04576f162050692a726a23e3ebf7",),
        "joined_cache.h",
        MENDED_MARKS[2],
    ),
)

_TREES = ("/third_party/", "/horovod/")
"""Folders of sources with which messages shall begin; what lies in the first is not of the second."""

_NVCC_MARKS = ("__CUDACC__", ".cudafe1.")  # it preprocesses, and later compiles what it made of that
_HEADERS = ("cstdint", "stdexcept", "string")
_HERE = Path(__file__).resolve().parent


def digest() -> str:
    """What Horovod's sources are changed by: with another digest another library is built."""
    headers = [header.read_bytes() for header in sorted(Path(__file__).parent.glob("*.h"))]
    return hashlib.sha256(b"\0".join([repr(CHANGES).encode(), *headers])).hexdigest()[:16]


def rewrite(arguments: Sequence[str], standard: str, relocations: Sequence[tuple[str, str]]) -> list[str]:
    """Give the arguments to pass on to the real compiler.

    Args:
        arguments: what CMake passed, without the program.
        standard: the C++ standard to compile for, such as ``c++20``.
        relocations: (folder, replacement) pairs; of a run path under folder, that part becomes the replacement.
            The first that fits wins. An empty replacement drops the run path.
    """
    if any(mark in argument for argument in arguments for mark in _NVCC_MARKS):
        return list(arguments)  # nvcc as caller has prepared the code for the standard it names
    kept = [argument for argument in arguments if not argument.startswith(("-std=", "--std="))]
    if "-shared" in kept:
        kept = list(_relocated(kept, relocations))
    if "-c" in kept:
        # Debug information makes the library ten times as large and compiling slower; nobody debugs Horovod here.
        kept = [argument for argument in kept if argument != "-g"]
        kept = [word for header in _HEADERS for word in ("-include", header)] + kept
        kept = [*_changes(kept), *_short_names(kept), *kept]
    return [f"-std={standard}", *kept]


def _changes(arguments: Sequence[str]) -> Iterator[str]:
    """Give the arguments that include a header of ours, where one of these is a source that was read."""
    for change in CHANGES:
        for argument in arguments:
            if change.applies(argument):
                # Headers of Horovod's are found beside the source, before those that a system has of the same name.
                yield from ("-include", str(_HERE / change.header), f'-DHVDTRAIN_MARK="{change.mark}"')
                yield from ("-iquote", str(Path(argument).parent))


def _short_names(arguments: Sequence[str]) -> Iterator[str]:
    """Give the argument by which messages name a source as it stands in Horovod's archive."""
    for argument in arguments:
        tree = next((tree for tree in _TREES if tree in argument), None)
        if tree and argument.endswith((".cc", ".cpp")) and argument.startswith("/"):
            # The last: the folder of the build may lie in one of such a name.
            yield f"-fmacro-prefix-map={argument[: argument.rindex(tree)]}/="


def relocate(run_path: str, relocations: Sequence[tuple[str, str]]) -> str:
    """Say where one run path points once the library is installed elsewhere; empty when it is to be dropped."""
    if run_path.rstrip("/").endswith("/stubs"):
        return ""  # CUDA's stub of the driver's library must never be found at run time
    for folder, replacement in relocations:
        if run_path == folder or run_path.startswith(folder + "/"):
            return replacement + run_path[len(folder) :] if replacement else ""
    return run_path


def _relocated(arguments: Sequence[str], relocations: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Replace the run paths; the linker itself still finds libraries where they are now (``-rpath-link``)."""
    new: dict[str, None] = {}
    words = iter(arguments)
    for argument in words:
        if argument in ("-Wl,-rpath", "-Wl,--rpath"):  # the path is in the next -Wl argument
            found = next(words, "").removeprefix("-Wl,")
        elif argument.startswith(("-Wl,-rpath,", "-Wl,-rpath=", "-Wl,--rpath=")):
            found = argument.partition("rpath")[2][1:]
        else:
            yield argument
            continue
        for run_path in filter(None, found.split(":")):
            yield f"-Wl,-rpath-link,{run_path}"
            new[relocate(run_path, relocations)] = None
    paths = [path for path in new if path]
    if paths:
        yield "-Wl,--enable-new-dtags"  # RUNPATH, so that LD_LIBRARY_PATH can still win
        yield "-Wl,-rpath," + ":".join(paths)


def wrapper_text(python: str, script: str, compiler: str, standard: str, relocations: Sequence[tuple[str, str]]) -> str:
    """Write the sh script that CMake is given as its compiler."""
    settings = [f"{folder}={replacement}" for folder, replacement in relocations]
    words = [python, "-I", "-S", script, compiler, standard, str(len(settings)), *settings]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def main(argv: Sequence[str]) -> None:
    """Become the real compiler. ``argv``: compiler, standard, number of relocations, these, the arguments."""
    compiler, standard, count, *rest = argv
    relocations = [(folder, target) for folder, _, target in (item.partition("=") for item in rest[: int(count)])]
    command = [*shlex.split(compiler), *rewrite(rest[int(count) :], standard, relocations)]
    os.execvp(command[0], command)  # noqa: S606  (no shell, by intent)


if __name__ == "__main__":
    main(sys.argv[1:])
