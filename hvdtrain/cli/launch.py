"""``hvdtrain launch``: an elastic job, whose ranks may come and go."""

from __future__ import annotations

import argparse
import json
import platform
import re
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.cli.launch_options import parse
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.launch import discovery
from hvdtrain.launch.commands import Limits
from hvdtrain.launch.driver import Driver
from hvdtrain.launch.hosts import LOCAL_NAMES, parse_hosts
from hvdtrain.launch.plan import Plan, describe, program_of, python_path
from hvdtrain.runtime.environment import JOB, LAUNCH_OPTIONS, environ

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def main(argv: list[str], program: Sequence[str] | None = None) -> int:
    """Run the subcommand. `program`: what ranks run in the place of ``python -m hvdtrain ARGS``.

    0 when training finished, 128 + number where a signal ended it, 2 on a wrong option, else 1.
    """
    try:
        options = parse(argv)
        plan = _plan(argv, options, program)
        if options.dry_run:
            hosts = discovery.ask(plan.script) if plan.script else plan.hosts
            print(describe(plan, hosts))
            return 0
        return _run(Driver(plan, _say, _show))
    except (HvdtrainError, OSError) as error:
        _say(f"error: {error}")
        return 2 if isinstance(error, HvdtrainError) else 1


def _run(driver: Driver) -> int:
    before = {name: signal.getsignal(signal.Signals[name]) for name in _SIGNALS}

    def handler(name: str) -> Callable[..., None]:
        return lambda *_: driver.signal(name)

    for name in _SIGNALS:
        signal.signal(signal.Signals[name], handler("SIGTERM" if name == "SIGHUP" else name))
    try:
        return driver.run()
    finally:
        for name, old in before.items():
            signal.signal(signal.Signals[name], old)


def _say(text: str) -> None:
    _show(f"hvdtrain launch: {text}", True)


def _show(text: str, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)  # ranks may write what a terminal cannot show
    with suppress(OSError):  # a terminal or a `head` that is gone ends no training
        print(text, file=stream, flush=True)


def _plan(argv: Sequence[str], options: argparse.Namespace, program: Sequence[str] | None) -> Plan:
    least, most = _range(options.elastic, options.np)
    hosts = parse_hosts(options.hosts) if options.hosts else {"localhost": most}
    limits = Limits(
        start=options.np,
        least=least,
        most=most,
        elastic=options.elastic is not None,
        restarts=options.restarts,
        reset_limit=options.reset_limit,
        hang_timeout_s=options.hang_timeout,
        elastic_timeout_s=options.elastic_timeout,
        start_timeout_s=options.start_timeout,
        gloo_timeout_s=options.gloo_timeout,
    )
    if options.discover is None and sum(hosts.values()) < options.np:
        found = f"{sum(hosts.values())} slot(s) of {options.hosts}"
        raise LaunchError("-np asks for more ranks than -H has slots.", expected=f"-np {options.np}", found=found)
    own = argv[: len(argv) - len(options.arguments)]
    variables = {**environ(), LAUNCH_OPTIONS: json.dumps(own), JOB: secrets.token_hex(8)}
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    return Plan(
        program=tuple(program) if program is not None else program_of(sys.executable, arguments),
        limits=limits,
        hosts=hosts,
        script=options.discover,
        local=frozenset({*LOCAL_NAMES, platform.node(), *filter(None, options.local.split(","))}),
        folder=str(Path.cwd()),
        environment=variables,
        python=sys.executable,
        path=python_path(variables),
        pass_on=tuple(options.env),
        ssh_port=options.ssh_port,
        ssh_options=tuple(options.ssh_option),
        interface=options.interface,
        events=options.events,
        tag=options.tag,
    )


def _range(text: str | None, start: int) -> tuple[int, int]:
    """Read ``MIN:MAX``; both are `start` where nothing was said."""
    if text is None:
        return start, start
    found = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})", text)
    if not found or not 1 <= int(found[1]) <= start <= int(found[2]):
        expected = f"MIN:MAX with 1 <= MIN <= -np ({start}) <= MAX"
        raise LaunchError("--elastic is not a range of numbers of ranks.", expected=expected, found=repr(text))
    return int(found[1]), int(found[2])
