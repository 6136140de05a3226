"""The C++ compiler that Horovod's build calls: the real one, with arguments that suit today's torch.

Run as a script by a two-line sh wrapper (`wrapper_text`), by ``python -I -S``: it must import nothing of ours.
Three things are changed. Horovod forces C++14 and bundles code that forces C++11, torch needs C++17 or later: the
last ``-std`` is ours. Newer compilers no longer include some standard headers by the way (horovod#3957). And the
run paths of a shared library would name the environment it was built in, which may be gone when it runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

_NVCC_MARKS = ("__CUDACC__", ".cudafe1.")  # it preprocesses, and later compiles what it made of that
_HEADERS = ("cstdint", "stdexcept", "string")


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
    return [f"-std={standard}", *kept]


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
