"""``hvdtrain launch --to hvdtrain``: hvdtrain's own driver, which can be elastic."""

from __future__ import annotations

import argparse
import math
import platform
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hvdtrain.launch import discovery
from hvdtrain.launch.commands import Limits
from hvdtrain.launch.driver import Driver
from hvdtrain.launch.hosts import LOCAL_NAMES
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.worker_plan import Plan, describe_plan, python_path
from hvdtrain.runtime.environment import JOB, LAUNCH_OPTIONS, environ, launch_options_text

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def start(own: Sequence[str], options: argparse.Namespace, spec: JobSpec, program: Sequence[str] | None) -> int:
    """Run a job, or print what would run; return the exit code.

    Args:
        own: the options as typed.
        options: the same, parsed.
        spec: the job.
        program: what ranks run instead of training.
    """
    plan = _plan(own, options, spec, program)
    if options.dry_run:
        hosts = discovery.run_script(plan.script, slots=plan.slots) if plan.script else plan.hosts
        print(describe_plan(plan, hosts))
        return 0
    driver = Driver(plan, say, _show)
    code = _run(driver)
    if code and spec.is_program and spec.elastic and not driver.had_round:
        say("with --elastic a program must call hvdtrain.torch's init and elastic.run; or use --to horovodrun")
    return code


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


def say(text: str) -> None:
    """Print a line to the user."""
    _show(f"hvdtrain launch: {text}", True)


def _show(text: str, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)  # the terminal may not support the characters
    with suppress(OSError):  # a closed terminal or `head` must not end training
        print(text, file=stream, flush=True)


def _program(spec: JobSpec) -> tuple[str, ...]:
    """Return the command of a rank. An elastic program talks to the driver itself, by `hvdtrain.torch`."""
    alone = spec.is_program and spec.elastic is None
    return (spec.python, "-m", "hvdtrain.launch.own_task", *spec.program) if alone else spec.program


def _plan(own: Sequence[str], options: argparse.Namespace, spec: JobSpec, program: Sequence[str] | None) -> Plan:
    least, most = spec.elastic or (spec.ranks, spec.ranks)
    limits = Limits(
        start=spec.ranks,
        least=least,
        most=most,
        elastic=spec.elastic is not None,
        restarts=options.restarts,
        reset_limit=options.reset_limit,
        hang_timeout_s=options.hang_timeout,
        elastic_timeout_s=options.elastic_timeout,
        start_timeout_s=options.start_timeout,
        gloo_timeout_s=options.gloo_timeout or 0,
    )
    if spec.is_program:
        limits = replace(limits, grace_s=math.inf)  # a rank may work longer than the others
    variables = {**environ(), LAUNCH_OPTIONS: launch_options_text(own), JOB: secrets.token_hex(8)}
    return Plan(
        program=tuple(program) if program is not None else _program(spec),
        limits=limits,
        hosts=spec.hosts or {"localhost": most},
        script=options.discover,
        slots=options.slots,
        local=frozenset({*LOCAL_NAMES, platform.node(), *filter(None, options.local.split(","))}),
        folder=spec.folder,
        environment=variables,
        python=spec.python,
        path=python_path(variables),
        pass_on=tuple(options.env),
        ssh_port=spec.ssh_port,
        ssh_options=spec.ssh_options,
        interface=spec.interface,
        events=options.events,
        tag=options.tag,
    )
