"""``hvdtrain bundle``: make a folder that installs everything without a network."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from sysconfig import get_python_version

import hvdtrain
from hvdtrain.cli.parser import Parser, local
from hvdtrain.errors import HvdtrainError
from hvdtrain.install.venv import EXTRAS
from hvdtrain.runtime.environment import environ


def parser() -> Parser:
    """Declare the options."""
    made = Parser(
        prog="hvdtrain bundle",
        description="Make a folder with hvdtrain, torch, all their dependencies, Horovod's source, and a script, "
        "install.sh, that installs them without a package registry. Repeat the command to continue after an interrupt.",
    )
    made.add_argument("folder", type=local, metavar="FOLDER", help="folder of the bundle")
    python = "Python version of the target machine (default: that of this Python)"
    made.add_argument("--python", metavar="3.X", help=python)
    torch = "version of torch, such as 2.13.0 or 2.13.0+cpu (default: the installed version, else the pinned one)"
    made.add_argument("--torch", metavar="VERSION", help=torch)
    platform = "wheel platform, such as manylinux_2_28_x86_64: Linux with glibc 2.28 or newer (default: this machine)"
    made.add_argument("--platform", metavar="NAME", help=platform)
    installed = "packages that the Python of the target machine has, such as torch,cmake: the bundle omits them"
    made.add_argument("--installed", metavar="NAMES", default="", help=installed)
    extras = f"extras of hvdtrain to install (default: {EXTRAS})"
    made.add_argument("--extras", metavar="NAMES", default=EXTRAS, help=extras)
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand and return its exit status."""
    options = parser().parse_args(argv)
    started = time.monotonic()
    try:
        size = _make(options)
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    print(f"{options.folder} is ready after {time.monotonic() - started:.0f} s: {size / 2**20:,.0f} MiB")
    print(f"copy it to the target machine and run: {options.folder.resolve().name}/install.sh VENV")
    return 0


def _make(options: argparse.Namespace) -> int:
    from packaging.utils import canonicalize_name

    from hvdtrain.doctor.facts.installation import package_version
    from hvdtrain.install import bundle, fetch
    from hvdtrain.install.build_plan import SDIST
    from hvdtrain.install.build_probe import cache_folder
    from hvdtrain.install.fetch import Target, this_platform

    variables = environ()
    cache, project = cache_folder(variables), Path(hvdtrain.__file__).parents[1]
    bundle.require_project(project)
    installed = tuple(sorted(canonicalize_name(name) for name in options.installed.split(",") if name.strip()))
    python, platform = options.python or get_python_version(), options.platform or this_platform()
    target = Target(python, platform, options.torch or "0", installed, options.extras)
    if options.torch is None:
        pins = fetch.pins((project / "constraints.txt").read_text(), target.markers)
        target = replace(target, torch=package_version("torch") or pins["torch"])
    cache.mkdir(parents=True, exist_ok=True)
    source = bundle.Source(project, cache / "horovod" / "sdist" / SDIST, cache / "bundle.log", variables)
    print(f"making a bundle for {target}   (log: {source.log})", flush=True)
    return bundle.make(source, options.folder, target, lambda line: print(f"  {line}", flush=True))
