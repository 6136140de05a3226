"""Settings for MPI, Horovod and torch that are put in place before any of them is loaded.

What the user set in the environment, or the user or the site in Open MPI's parameter files, is kept. `rules` holds
what is known; here it is weighed against that, and written. The variables that we wrote are listed in one of our own
(`RECORD`), so that a process started by this one does not take them for the user's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.runtime import environment, mpi
from hvdtrain.runtime.environment import RankInfo, rank_info
from hvdtrain.runtime.host import HostFacts, read_host
from hvdtrain.runtime.mpi import MpiLibrary
from hvdtrain.runtime.rules import RULES, Facts, Setting
from hvdtrain.runtime.site import site_settings

RECORD = "HVDTRAIN_SET"


@dataclass(frozen=True)
class Choice:
    """What became of a setting.

    Attributes:
        setting: what we would set.
        kept: why it is not set: whose value stands; None when it is set.
        late: it is not set only because the module that reads it is loaded already.
    """

    setting: Setting
    kept: str | None = None
    late: bool = False

    @property
    def applied(self) -> bool:
        """Whether the setting is put in place."""
        return self.kept is None

    def __str__(self) -> str:
        setting = self.setting
        if self.kept is not None:
            return f"{setting.variable}: {self.kept}; {setting.value} would be set because {setting.reason}"
        return f"{setting.variable}={setting.value}: {setting.reason} ({setting.effect})"


def choose(
    info: RankInfo,
    environ: Mapping[str, str],
    host: HostFacts,
    library: MpiLibrary | None = None,
    *,
    site: Mapping[str, tuple[str, Path]] | None = None,
    loaded: Collection[str] = (),
    ours: Mapping[str, str] | None = None,
) -> list[Choice]:
    """Choose the settings for a rank. Pure.

    Args:
        info: this rank.
        environ: the environment without what we ourselves wrote there.
        host: what the host offers.
        library: the libmpi that Horovod loads.
        site: what Open MPI's parameter files set (`site.site_settings`).
        loaded: names of the modules that are imported already.
        ours: what we wrote before; these were in place when modules were loaded.
    """
    facts = Facts(info, host, library, environ)
    settings = [setting for rule in RULES for setting in rule(facts)]
    late = {
        setting.variable
        for setting in settings
        if setting.before in loaded and (ours or {}).get(setting.variable) != setting.value
    }
    choices = []
    for setting in settings:
        kept = _kept(setting, environ, site or {})
        if kept is None and setting.variable in late:
            choices.append(Choice(setting, f"too late, {setting.before} is loaded", late=True))
        else:
            choices.append(Choice(setting, kept))
    return choices


def _kept(setting: Setting, environ: Mapping[str, str], site: Mapping[str, tuple[str, Path]]) -> str | None:
    for variable in dict.fromkeys((setting.variable, *setting.settled_by)):
        if variable in environ:
            return f"kept {variable}={environ[variable]} of the environment"
        if variable in site:
            value, path = site[variable]
            return f"kept {variable.removeprefix('OMPI_MCA_')}={value} of {path}"
    return None


def written_by_us(environ: Mapping[str, str]) -> dict[str, str]:
    """Give those variables that `apply` wrote, here or in the process that started this one, and nobody changed."""
    try:
        record = json.loads(environ.get(RECORD, "{}"))
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: value for name, value in record.items() if isinstance(value, str) and environ.get(name) == value}


def of_others(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the environment without what we ourselves wrote there."""
    ours = written_by_us(environ)
    return {name: text for name, text in environ.items() if name not in ours and name != RECORD}


def apply(choices: list[Choice]) -> None:
    """Write the chosen settings into this process's environment; what we wrote before and no longer hold, goes."""
    chosen = {choice.setting.variable: choice.setting.value for choice in choices if choice.applied}
    gone: dict[str, str | None] = dict.fromkeys([*written_by_us(environment.environ()), RECORD])
    record = {RECORD: json.dumps(chosen)} if chosen else {}
    environment.change_variables({**gone, **chosen, **record})


def prepare() -> tuple[RankInfo, list[Choice]]:
    """Find out which rank this is and put the settings in place; the first thing that an entry point does.

    It comes before torch, mpi4py and Horovod are imported. Calling it again changes nothing. The variables of what is
    returned are those with the settings in place.

    Errors:
        LaunchError: the launcher's variables make no sense.
    """
    now = environment.environ()
    ours = written_by_us(now)
    before = of_others(now)
    info = rank_info(before)
    library = mpi.mpi_library(mpi.horovod_library(), before)
    site = site_settings(before, library.path) if library and library.family == "openmpi" else {}
    loaded = [name for name in ("torch", "mpi4py.MPI", "horovod.torch") if name in sys.modules]
    choices = choose(info, before, read_host(before), library, site=site, loaded=loaded, ours=ours)
    apply(choices)
    return replace(info, variables=environment.environ(), folder=Path.cwd()), choices
