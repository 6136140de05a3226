"""Profiles of sites: options, variables and modules for the jobs of a cluster, in a YAML file found by host name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.files import is_private, open_regular
from hvdtrain.launch.variables import secret_variables

NONE = "none"
_SYSTEM = Path("/etc/hvdtrain/sites")
_KEYS = ("hosts", "options", "environment", "modules", "setup")


@dataclass(frozen=True)
class Site:
    """A profile."""

    name: str = ""
    path: Path = Path()
    hosts: tuple[str, ...] = ()  # patterns of host names
    options: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # of `hvdtrain launch`, not yet checked
    environment: Mapping[str, str] = field(default_factory=dict)  # variables; those of the user override them
    modules: tuple[str, ...] = ()  # to load in batch scripts
    setup: tuple[str, ...] = ()  # lines of shell in batch scripts, before the modules

    def __str__(self) -> str:
        """Return its name and file."""
        return f"site {self.name} ({self.path})"

    def matches(self, host: str) -> bool:
        """Check whether a pattern matches a host name, or its first part."""
        names = (host.lower(), host.lower().partition(".")[0])
        return any(fnmatchcase(name, pattern.lower()) for pattern in self.hosts for name in names)

    def missing_modules(self, environ: Mapping[str, str]) -> list[str]:
        """Return the modules that the user's shell has loaded in no version."""
        loaded = {_without_version(name) for name in environ.get("LOADEDMODULES", "").split(":")}
        return [name for name in self.modules if _without_version(name) not in loaded]


NO_SITE = Site()


def _without_version(module: str) -> str:
    """Return the name of a module, such as ``devel/cuda`` of ``devel/cuda/12.4``."""
    return module.rpartition("/")[0] or module


def find_site(asked: str | None, host: str, environ: Mapping[str, str]) -> Site:
    """Return the requested profile, else the first that matches this host, else that of no site.

    `asked`: a name, or the path of a file; None to search by host name. Errors: LaunchError if there is no such
    profile, or it is invalid, or other users can change it; ConfigError if it is not YAML.
    """
    if asked == NONE:
        return NO_SITE
    if asked is not None and ("/" in asked or asked.endswith(".yaml")):
        return parse_site(_read(Path(asked), from_folder=False), Path(asked))
    found = [path for folder in _folders(environ) for path in sorted(folder.glob("[!.]*.yaml"))]
    if asked is not None:
        path = next((path for path in found if path.stem == asked), None)
        if path is None:
            raise LaunchError(
                f"there is no profile of a site {asked!r}",
                expected=f"{asked}.yaml in {', '.join(map(str, _folders(environ)))}",
                found=", ".join(map(str, found)) or "none",
                next_step="docs/launching.md has an example; --site FILE uses a file elsewhere",
            )
        return parse_site(_read(path, from_folder=True), path)
    sites = (parse_site(_read(path, from_folder=True), path) for path in found)
    return next((site for site in sites if site.matches(host)), NO_SITE)


def parse_site(text: bytes, path: Path) -> Site:
    """Return the profile in the text of a file. Pure.

    Errors: LaunchError for an unknown key, a wrong type, or a variable that looks like a secret; ConfigError if it is
    not YAML.
    """
    from hvdtrain.yaml_file import TextLoader, parse_yaml  # PyYAML takes 30 ms

    content = parse_yaml(text, f"the profile {str(path)!r}", "lines like `options: {queue: gpu}`", TextLoader)
    for key in content:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, 1)
            next_step = f"did you mean {near[0]}?" if near else "options of hvdtrain launch belong under options:"
            raise wrong(path, f"{key!r} is not a part of a profile", expected=", ".join(_KEYS), next_step=next_step)
    if bad := next((text for text in _strings(content) if re.search("[\0\ud800-\udfff]", text)), None):
        raise wrong(path, "a text has a null character or no Unicode character", found=repr(bad)[:100])
    lists = {key: _texts(path, key, content.get(key) or []) for key in ("hosts", "modules", "setup")}
    modules = lists["modules"]
    if module := next((name for name in modules if not re.fullmatch("[!-,.-9;-~][!-9;-~]*", name)), None):
        raise wrong(path, f"{module!r} is not the name of a module", expected="such as openmpi/4.1.8")
    options, environment = (_mapping(path, key, content.get(key) or {}) for key in ("options", "environment"))
    for name, value in options.items():
        options[name] = value if isinstance(value, str) else _texts(path, f"options: {name}", value)
    for name, value in environment.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or not isinstance(value, str):
            found = f"{name}: {value!r}"[:100]
            raise wrong(path, "environment is invalid", expected="lines NAME: VALUE", found=found)
    if secrets := secret_variables(environment):
        raise wrong(
            path,
            f"{', '.join(secrets)} looks like a secret, and values in a profile are written to scripts",
            expected="variables that are no secrets",
            next_step="write it to a file that only you can read, and have the job read that: such as ~/.netrc",
        )
    return Site(path.stem, path, options=options, environment=environment, **lists)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in (
        (*value.keys(), *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _strings(part)


def wrong(
    path: Path, what: str, expected: str | None = None, found: str | None = None, next_step: str | None = None
) -> LaunchError:
    """Return the error of a profile."""
    return LaunchError(f"the profile {str(path)!r}: {what}", expected=expected, found=found, next_step=next_step)


def _texts(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each.strip() for each in value):
        raise wrong(path, f"{key} is invalid", expected="a list of texts: [a, b]", found=repr(value)[:100])
    return tuple(value)


def _mapping(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise wrong(path, f"{key} is invalid", expected="lines NAME: VALUE", found=repr(value)[:100])
    return value


def _folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of profiles, the user's first."""
    own = environ.get("HVDTRAIN_SITES", "")
    if own and not Path(own).is_dir():
        raise LaunchError("HVDTRAIN_SITES is not a folder", expected="a folder of profiles, NAME.yaml", found=own)
    config = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    return [Path(own)] * bool(own) + [Path(config, "hvdtrain/sites")] * bool(config) + [_SYSTEM]


def _read(path: Path, *, from_folder: bool) -> bytes:
    """Read a profile. One that was found in a folder must be of root or this user: its lines run as shell."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if from_folder and not is_private(status):
                raise wrong(
                    path,
                    "other users can change it, and its lines run in your jobs",
                    expected="a file of root or yours, which nobody else may write",
                    found=f"owner {status.st_uid}, mode {status.st_mode & 0o777:o}",
                    next_step=f"chmod go-w {path}; or, if you trust it, --site {path}; or --site none",
                )
            return file.read()
    except OSError as error:
        next_step = "correct the path; or --site none"
        raise LaunchError(f"cannot read the profile {str(path)!r}: {error.strerror}", next_step=next_step) from None
