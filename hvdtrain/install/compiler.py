"""The C++ compiler for Horovod's build: a wrapper that changes the arguments of the real compiler.

A two-line sh script (`wrapper_text`) runs this file with ``python -I -S``, so it must not import hvdtrain. The changes:

- The C++ standard: Horovod forces C++14 and bundles code that forces C++11, but torch needs C++17 or later.
- Standard headers that newer compilers no longer include implicitly (horovod#3957).
- Run paths: they would name the build environment, which may not exist at run time.
- File names in messages: they would name the folder of the build.
- Patches: a header is included first in some sources of Horovod and Gloo, if their content is known (`CHANGES`).
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
"""Text in a library of Horovod with a Timeline thread that sleeps when idle."""

PROMPT_MARKS = ("hvdtrain-prompt-cycle", "hvdtrain-prompt-done", "hvdtrain-prompt-wait")
"""Texts in a library of Horovod with threads that sleep until there is work, if `HVDTRAIN_PROMPT` is set."""

FIX_MARKS = ("hvdtrain-pair-errors", "hvdtrain-late-release", "hvdtrain-joined-cache")
"""Texts that our build leaves in Horovod's library, one for each fault that it fixes: ranks that wait for the rest of a
message get an error when its sender is lost; a shutdown does not deadlock with a thread that enqueues tensors; a rank
that has joined executes no cached allgather or alltoall."""


@dataclass(frozen=True)
class Change:
    """A header that is included first when a certain source of Horovod is compiled."""

    source: str  # end of the source's path
    read: str  # sha256 of the known version of the source. Other versions are compiled unchanged
    header: str  # file in this folder. Its first lines explain the change and why it is safe
    mark: str  # text that the library contains only if the header took effect

    def applies(self, argument: str) -> bool:
        """Tell whether an argument of the compiler is this source in a known version."""
        return (
            argument.endswith(f"/{self.source}")
            and hashlib.sha256(Path(argument).read_bytes()).hexdigest() == self.read
        )


# For Horovod 0.28.1: source, header, SHA-256 of the source.
# quiet_timeline: the Timeline thread of rank 0 writes events from a queue, checks whether to open or close a file,
# calls std::this_thread::yield and repeats; yield has no other caller. It holds no mutex at that point. Only opening or
# closing a file and the shutdown wait for it; with 10 ms of sleep they wait up to 20 ms longer. The queue holds a
# million events, which 10 ms cannot fill. A killed process, and a shutdown with an open file, lose the last 10 ms of
# events. (With 1 ms of sleep the thread took 1.3% of a core.)
_KNOWN = """
horovod/common/timeline.cc quiet_timeline 00fd3e4125bdc92e80e59a6e3b1a3227fd53b6f82edd87a93c21141d01c88e74
horovod/common/operations.cc prompt_cycle 0131aebee083cbd79e5a1c8bedd0f644faf5dd45df4e91bcb765ae46c436baf4
horovod/torch/handle_manager.cc prompt_done 58192ce7b38b3f822f5673784d9d44d491f3365c59434b4d15b76ae59f9c436c
horovod/torch/mpi_ops_v2.cc prompt_wait e33c17c9ce12de8d02d38473af8a042da3a591c3dc63da55d5247d3d28f6100d
gloo/transport/tcp/pair.cc pair_errors 7abd292c5c927a4258f0f00a2a627264d24d4adaa724c81dd56208397aac0d93
horovod/common/tensor_queue.cc late_release da59b96d10291ec14f46f46fed81bfebf7e8f9c3a4817102c2b745a6a0e31fd0
horovod/common/controller.cc joined_cache 310cac98ca6b97c942e7199fcdeac1ed4acf04576f162050692a726a23e3ebf7
"""
CHANGES = tuple(
    Change(source, sha256, f"{name}.h", f"hvdtrain-{name.replace('_', '-')}")
    for source, name, sha256 in map(str.split, _KNOWN.strip().splitlines())
)

_TREES = ("/third_party/", "/horovod/")
"""Folders of sources at which file names in messages begin. The first match counts."""

_NVCC_MARKS = ("__CUDACC__", ".cudafe1.")  # nvcc preprocesses, and later compiles the result
_HEADERS = ("cstdint", "stdexcept", "string")
_HERE = Path(__file__).resolve().parent


def digest() -> str:
    """Return a digest of all patches. Another digest gives another library."""
    headers = [header.read_bytes() for header in sorted(Path(__file__).parent.glob("*.h"))]
    return hashlib.sha256(b"\0".join([repr(CHANGES).encode(), *headers])).hexdigest()[:16]


def rewrite(arguments: Sequence[str], standard: str, relocations: Sequence[tuple[str, str]]) -> list[str]:
    """Return the arguments for the real compiler, from those of CMake.

    `standard` is such as ``c++20``. `relocations` are (folder, replacement) pairs for run paths below a folder. The
    first match counts. An empty replacement removes the run path.
    """
    if any(mark in argument for argument in arguments for mark in _NVCC_MARKS):
        return list(arguments)  # nvcc has prepared the code for the standard in its arguments
    kept = [argument for argument in arguments if not argument.startswith(("-std=", "--std="))]
    if "-shared" in kept:
        kept = list(_relocated(kept, relocations))
    if "-c" in kept:
        # Debug information makes the library ten times as large and compilation slower.
        kept = [argument for argument in kept if argument != "-g"]
        kept = [word for header in _HEADERS for word in ("-include", header)] + kept
        kept = [*_changes(kept), *_short_names(kept), *kept]
    return [f"-std={standard}", *kept]


def _changes(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments that include our header, if a known source is compiled."""
    for change in CHANGES:
        for argument in arguments:
            if change.applies(argument):
                # Horovod's headers in the folder of the source precede system headers of the same name.
                yield from ("-include", str(_HERE / change.header), f'-DHVDTRAIN_MARK="{change.mark}"')
                yield from ("-iquote", str(Path(argument).parent))


def _short_names(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the argument that shortens file names in messages to those in Horovod's archive."""
    for argument in arguments:
        tree = next((tree for tree in _TREES if tree in argument), None)
        if tree and argument.endswith((".cc", ".cpp")) and argument.startswith("/"):
            # The last match, because the folder of the build may contain such a name too.
            yield f"-fmacro-prefix-map={argument[: argument.rindex(tree)]}/="


def relocate(run_path: str, relocations: Sequence[tuple[str, str]]) -> str:
    """Return a run path for the installed library; empty to remove it."""
    if run_path.rstrip("/").endswith("/stubs"):
        return ""  # the stub of CUDA's driver library must not be found at run time
    for folder, replacement in relocations:
        if run_path == folder or run_path.startswith(folder + "/"):
            return replacement + run_path[len(folder) :] if replacement else ""
    return run_path


def _relocated(arguments: Sequence[str], relocations: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Replace the run paths. The linker itself still finds libraries in the old folders (``-rpath-link``)."""
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
        yield "-Wl,--enable-new-dtags"  # RUNPATH, so that LD_LIBRARY_PATH takes precedence
        yield "-Wl,-rpath," + ":".join(paths)


def wrapper_text(python: str, compiler: str, standard: str, relocations: Sequence[tuple[str, str]]) -> str:
    """Return the sh script that CMake uses as its compiler."""
    settings = [f"{folder}={replacement}" for folder, replacement in relocations]
    words = [python, "-I", "-S", str(Path(__file__).resolve()), compiler, standard, str(len(settings)), *settings]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def main(argv: Sequence[str]) -> None:
    """Execute the real compiler. ``argv``: compiler, standard, number of relocations, relocations, arguments."""
    compiler, standard, count, *rest = argv
    relocations = [(folder, target) for folder, _, target in (item.partition("=") for item in rest[: int(count)])]
    command = [*shlex.split(compiler), *rewrite(rest[int(count) :], standard, relocations)]
    os.execvp(command[0], command)  # noqa: S606  (no shell, by intent)


if __name__ == "__main__":
    main(sys.argv[1:])
