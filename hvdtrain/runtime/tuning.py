"""Settings for MPI, Horovod and torch, made before any of them is loaded; whether Horovod records its own Timeline.

Settings of the user, in the environment or in Open MPI's parameter files, take precedence over those of `rules`. An
``OMPI_MCA_*`` variable overrides these files, so ours would silently undo a site's settings: read the files first. They
are those that ``ompi_info`` lists as ``mca_param_files`` and ``mca_base_override_param_file``.

The variables that we set are listed in one of our own (`RECORD`), so that a child process does not take them for the
user's.

``HOROVOD_TIMELINE=DYNAMIC`` in the environment of `hvd.init()` allows windows: `hvd.start_timeline(path)` and
`hvd.stop_timeline()`. From `hvd.init()` on it costs, even while no window is open (from Horovod 0.28.1's timeline.cc):

- a thread of rank 0 that polls for work without sleeping, a core's worth of time (`threads` limits it). In a quiet
  Horovod, from `hvdtrain build-horovod`, it sleeps for 10 ms between polls (`install.compiler`);
- bits for the negotiation, exchanged by every rank in each cycle: either all ranks have the variable or none, else the
  exchange fails. So the decision must be equal on all ranks, before they can communicate;
- on GPUs an event for each part of each collective.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hvdtrain.config.windows import AUTO, OFF, Window, parse_window
from hvdtrain.install.record import installed
from hvdtrain.runtime import environment, mpi
from hvdtrain.runtime.channel import VARIABLE as CHANNEL
from hvdtrain.runtime.environment import NO_LAUNCHER, RankInfo, rank_info
from hvdtrain.runtime.host import HostFacts, read_host
from hvdtrain.runtime.mpi import MpiLibrary
from hvdtrain.runtime.rules import KEEP_MEMORY, Facts, Setting, settings

RECORD = "HVDTRAIN_SET"
_PREFIX = "OMPI_MCA_"

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGEST_INT = (1 << 31) - 1
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)  # DEFAULT_MMAP_THRESHOLD_MAX of malloc.c

TIMELINE = "HOROVOD_TIMELINE"
DYNAMIC = "DYNAMIC"

AUTO_WINDOW = Window(10, 20)
"""After the first steps, which are not typical."""

ASK = f"--observe.timeline {AUTO_WINDOW.first}:{AUTO_WINDOW.last}"


@dataclass(frozen=True)
class Choice:
    """The decision on a setting."""

    setting: Setting
    kept: str | None = None  # why it is not made; None if it is
    late: bool = False  # it is not made only because the module that reads it is already loaded

    @property
    def applied(self) -> bool:
        """Whether the setting is made."""
        return self.kept is None


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
    """Choose the settings of a rank. Pure.

    `environ` is without variables that we set; `ours` are those, set before the modules in `loaded` were imported.
    `library` is the libmpi that Horovod loads; `site` has the settings of Open MPI's parameter files (`site_settings`).
    """
    facts = Facts(info, host, library, environ)
    choices = []
    for setting in settings(facts):
        kept = _kept(setting, environ, site or {})
        late = kept is None and setting.before in loaded and (ours or {}).get(setting.variable) != setting.value
        choices.append(Choice(setting, f"too late, {setting.before} is loaded" if late else kept, late))
    return choices


def _kept(setting: Setting, environ: Mapping[str, str], site: Mapping[str, tuple[str, Path]]) -> str | None:
    for variable in dict.fromkeys((setting.variable, *setting.settled_by)):
        if variable in environ:
            return f"kept {variable}={environ[variable]} of the environment"
        if variable in site:
            value, path = site[variable]
            return f"kept {variable.removeprefix(_PREFIX)}={value} of {path}"
    return None


def open_mpi_files(environ: Mapping[str, str], library: Path | None) -> list[Path]:
    """Return the parameter files, highest priority first. ``library``: the libmpi in use."""
    if own := environ.get(f"{_PREFIX}mca_base_param_files") or environ.get(f"{_PREFIX}mca_param_files"):
        return [Path(part) for part in own.replace(",", ":").split(":") if part]
    folders = [Path("/etc/openmpi")]
    if library is not None:
        # Debian's library is two folders below its prefix, which links etc to /etc/openmpi
        folders = [library.parent.parent / "etc", library.resolve().parent.parent / "etc", *folders]
    if prefix := environ.get("OPAL_PREFIX"):
        folders.insert(0, Path(prefix) / "etc")
    if etc := environ.get("OPAL_SYSCONFDIR"):
        folders.insert(0, Path(etc))
    home = [Path(environ["HOME"]) / ".openmpi/mca-params.conf"] if "HOME" in environ else []
    override = [folder / "openmpi-mca-params-override.conf" for folder in folders]
    return [*override, *home, *(folder / "openmpi-mca-params.conf" for folder in folders)]


def read_parameters(text: str) -> dict[str, str]:
    """Parse ``name = value`` lines; ``#`` starts a comment. A later line wins."""
    lines = (line.split("#", 1)[0].partition("=") for line in text.splitlines())
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in lines if equals and name.strip()}


def site_settings(environ: Mapping[str, str], library: Path | None) -> dict[str, tuple[str, Path]]:
    """Return the settings of the files as (value, file), by the environment variable that would override each."""
    found: dict[str, tuple[str, Path]] = {}
    for path in open_mpi_files(environ, library):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        for name, value in read_parameters(text).items():
            found.setdefault(_PREFIX + name, (value, path))
    return found


def our_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `apply_settings` set, here or in the parent process, and that nobody changed since."""
    try:
        record = json.loads(environ.get(RECORD, "{}"))
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: value for name, value in record.items() if isinstance(value, str) and environ.get(name) == value}


def without_our_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that we set."""
    ours = our_variables(environ)
    return {name: text for name, text in environ.items() if name not in ours and name != RECORD}


def apply_settings(choices: list[Choice]) -> None:
    """Set the chosen variables of this process, and remove earlier ones that are no longer chosen."""
    chosen = {choice.setting.variable: choice.setting.value for choice in choices if choice.applied}
    gone: dict[str, str | None] = dict.fromkeys([*our_variables(environment.environ()), RECORD])
    record = {RECORD: json.dumps(chosen)} if chosen else {}
    environment.change_variables({**gone, **chosen, **record})


def prepare() -> tuple[RankInfo, list[Choice]]:
    """Detect this process's rank and make the settings; an entry point calls this first.

    Call it before torch, mpi4py and Horovod are imported. Further calls change nothing. The returned variables include
    the settings. Errors: LaunchError if the launcher's variables are invalid.
    """
    now = environment.environ()
    ours = our_variables(now)
    before = without_our_variables(now)
    info = rank_info(before)
    library = mpi.mpi_library(mpi.horovod_library(), before)
    site = site_settings(before, library.path) if library and library.family == "openmpi" else {}
    loaded = [name for name in ("torch", "mpi4py.MPI", "horovod.torch") if name in sys.modules]
    choices = choose(info, before, read_host(before), library, site=site, loaded=loaded, ours=ours)
    apply_settings(choices)
    if environment.environ().get(KEEP_MEMORY) == "1":
        keep_freed_memory()
    return replace(info, variables=environment.environ(), folder=Path.cwd()), choices


def keep_freed_memory() -> bool:
    """Let malloc keep up to 2 GiB of freed memory, and reuse it also for tensors of up to 32 MiB.

    By default it gets large tensors from the kernel and gives them back, in every step, and each of their pages is
    filled with zeros again. Return whether that is possible here.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _LARGEST_INT))


def return_freed_memory() -> None:
    """Give freed memory back to the kernel, also between memory in use.

    Tensors of less than 32 MiB may leave gaps that no tensor of the same size fits into (glibc before 2.38).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@dataclass(frozen=True)
class TimelinePlan:
    """The plan for Horovod's Timeline.

    ``kind`` is off: not requested; window: recorded by us; theirs: set by the user, not touched; spans: not recorded,
    only our own spans.
    """

    kind: Literal["off", "window", "theirs", "spans"]
    window: Window = OFF  # the steps to record; `OFF` unless `kind` is window
    reason: str = ""
    quiet: bool = False  # whether its writer's thread sleeps while it has no work; otherwise it spins

    def __str__(self) -> str:
        if self.kind == "window":
            until = "on" if self.window.last is None else f"to {self.window.last}"
            return f"Horovod's Timeline of steps {self.window.first} {until}"
        what = {"off": "not wanted", "theirs": "left as the user set it", "spans": "only our own spans"}[self.kind]
        return f"{what}: {self.reason}" if self.reason else what


def decide(wanted: str, facts: Facts, *, quiet: bool) -> TimelinePlan:
    """Decide the plan. Pure.

    ``wanted``: the option ``observe.timeline``; ``facts``: without variables that we set; ``quiet``: of `BuildRecord`.
    """
    theirs = facts.already.get(TIMELINE)
    # An empty name opens no file and makes windows possible, as DYNAMIC does.
    is_open = theirs in (DYNAMIC, "")
    if wanted == "off":
        return TimelinePlan("off")
    if theirs is not None and (wanted == AUTO or not is_open):
        return TimelinePlan("theirs", reason=f"{TIMELINE}={theirs} is set")
    if facts.info.launcher == NO_LAUNCHER:
        return TimelinePlan("spans", reason="one process alone has no use for Horovod")
    if wanted != AUTO:
        return TimelinePlan("window", parse_window(wanted, "observe.timeline", AUTO), quiet=quiet)
    reason = next(_costs(facts, quiet), None)
    return TimelinePlan("spans", reason=reason) if reason else TimelinePlan("window", AUTO_WINDOW, quiet=quiet)


def _costs(facts: Facts, quiet: bool) -> Iterator[str]:
    """Yield reasons why an automatic Timeline might slow the training."""
    if CHANNEL in facts.already:
        yield "hvdtrain launch starts ranks one by one, and all ranks of a round need the same decision"
    if facts.info.size == 1:
        yield "one rank has nothing to exchange"
    if not facts.info.one_host:
        yield "ranks on several hosts cannot agree in advance that it is free on each host"
    if facts.host.gpus:
        yield "its cost on GPUs was not measured"
    if quiet:
        return
    if facts.host.quota:
        yield "its writer's thread would use CPU time of this container's quota"
    # own_cores may differ from rank to rank where a launcher binds them unevenly
    if replace(facts, host=replace(facts.host, own_cores=facts.host.cores)).cores_are_full:
        yield "its writer's thread needs a core, and the ranks use them all"


def prepare_timeline(wanted: str, info: RankInfo) -> TimelinePlan:
    """Decide the plan and set Horovod's variable; call it before Horovod is initialised.

    Call it after `tuning.prepare`, which removes variables of an earlier call.
    """
    now = environment.environ()
    before = without_our_variables(now)
    horovod = installed()
    quiet = horovod is not None and horovod.quiet
    plan = decide(wanted, Facts(info, read_host(before), already=before), quiet=quiet)
    if plan.window and TIMELINE not in before:
        record = json.dumps({**our_variables(now), TIMELINE: DYNAMIC})
        environment.change_variables({TIMELINE: DYNAMIC, RECORD: record})
    return plan
