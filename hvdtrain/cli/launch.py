"""``hvdtrain launch``: start a job by MPI, a scheduler, or hvdtrain's own driver."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.cli.launch_options import given, parse, parser
from hvdtrain.cli.launch_spec import idle_gpus, plan_of, spec_of
from hvdtrain.errors import USAGE, HvdtrainError, LaunchError, exit_code
from hvdtrain.launch import choose
from hvdtrain.launch.detect import Machine, detect_machine, search_path
from hvdtrain.launch.driver import Driver
from hvdtrain.launch.hosts import run_script
from hvdtrain.launch.job_output import SAID
from hvdtrain.launch.site import NO_SITE, Site, find_site, wrong
from hvdtrain.launch.spec import Command, JobSpec, Script
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.targets.base import Target
from hvdtrain.launch.variables import secret_variables, submit_environment
from hvdtrain.launch.worker_plan import SSH, WorkerPlan, describe_plan
from hvdtrain.observe.output import unfailing
from hvdtrain.programs import output, run_program
from hvdtrain.runtime.environment import LAUNCH_OPTIONS, change_variables, environ, launch_options_text

_SIGNALS = {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "SIGHUP": "SIGTERM", "SIGUSR1": "SIGUSR1"}
"""Signals that our own driver handles, and as which."""
_OF_COMMAND = ("help", "dry_run", "site")
"""Options that make no sense in a site's profile."""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the launcher's exit code.

    hvdtrain's own driver returns 0 when training finished, and 128 + number where a signal ended it.
    2: an error that would recur, such as a wrong option; 1: the job could not be started.
    """
    site = NO_SITE
    try:
        typed = parse(argv)
        site = find_site(typed.site, platform.node(), environ())
        options, choice, spec = _job(argv, typed, site)
        own = argv[: len(argv) - len(options.arguments)]
        plan = plan_of(own, options, spec, environ()) if choice.target == choose.OWN else None
        _say_choice(choice, spec, plan, site, starts=not options.dry_run)
        if note := idle_gpus(spec, choice.target, environ()):
            say(note)
        if options.hosts and not options.dry_run:
            _check_ssh(spec, choice.target, plan)
        if plan is not None:
            return _drive(plan, options.dry_run)
        target = TARGETS[choice.target]
        start = target.render(spec)
        if isinstance(start, Command):
            start = _found(Command(start.argv, {**spec.site_variables, **start.variables}))
        text = str(start) if options.dry_run or isinstance(start, Script) else ""  # scripts and manifests are UTF-8
        if found := re.search("[\ud800-\udfff]+", text):
            raise LaunchError("an argument or the folder is not UTF-8", found=repr(text[: found.end()][-40:]))
        if options.dry_run:
            print(start)
            return 0
        if target.shows_variables and (hidden := secret_variables(environ())):
            say(f"not passed to the ranks, because other users could read them: {', '.join(hidden)}")
        if isinstance(start, Command):
            return _run(own, start, target)
        if spec.trains and not target.elsewhere and not _takes_arguments(spec):
            say("error: training does not accept these arguments; nothing was submitted")
            return USAGE
        return _submit(start, target)
    except (HvdtrainError, OSError) as error:
        say(f"error: {error}")
        if site is not NO_SITE:
            say(f"options of the {site} apply, too; --site none leaves them out")
        return exit_code(error)


def _job(argv: list[str], typed: argparse.Namespace, site: Site) -> tuple[argparse.Namespace, choose.Choice, JobSpec]:
    """Return the options, the target and the job. Set the variables of the site's profile in this process."""
    # Options of a profile neither choose our own driver nor are refused.
    asked = [name for name in given(typed) if name != "container" or typed.container]
    change_variables({name: value for name, value in site.environment.items() if name not in environ()})
    options = merge(site, argv, typed)
    machine = detect_machine(environ()) if choose.needs_machine(options.to, asked) else Machine()
    machine = replace(machine, pmi=options.pmi or "")
    choice = choose.choose(options.to, {*asked, *(["container"] if options.container else [])}, machine)
    choose.refuse_options(choice.target, asked)
    choose.refuse_container(choice.target, asked, options.container)
    options = merge(site, argv, typed, choice.target)
    spec = spec_of(options, choice, machine, environ(), site)
    choose.refuse_shape(spec, choice.target)
    return options, choice, spec


def _say_choice(choice: choose.Choice, spec: JobSpec, plan: WorkerPlan | None, site: Site, *, starts: bool) -> None:
    agents = f"; agents on other hosts by {plan.starter.by}" if plan and (spec.remote or spec.discover) else ""
    box = f"; containers by {spec.container.runtime}" if spec.container else ""
    by_site = f"; {site}" if site is not NO_SITE else ""
    what = f"starting {spec.ranks} rank(s), " if starts else ""
    say(f"{what}--to {choice.target}{f' ({choice.mpi})' if choice.mpi else ''}: {choice.why}{agents}{box}{by_site}")
    missing = site.missing_modules(environ())
    if missing and not {"directive", "image"} & choose.options_of(choice.target):  # only scripts load them
        say(f"modules of the site that are not loaded here: {' '.join(missing)}")


def _check_ssh(spec: JobSpec, target: str, plan: WorkerPlan | None) -> None:
    """Check that ranks can start on the named hosts. Errors: LaunchError: it takes ssh, and there is none."""
    if plan is not None:
        hosts = [host for host in spec.other_hosts if plan.starter.by_for(host) == SSH]
        has_ssh = shutil.which(SSH, path=search_path(environ())) is not None
    else:
        in_job = bool({"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"} & environ().keys())
        hosts = spec.other_hosts if target == "openmpi" and not in_job else []
        has_ssh = spec.remote_shell
    if hosts and not has_ssh:
        raise LaunchError(
            "there is no ssh on this machine",
            expected=f"ssh on PATH, to start ranks on {', '.join(hosts[:3])}",
            next_step="sudo apt-get install openssh-client   (Fedora, RHEL: sudo dnf install openssh-clients)",
        )


def say(text: str) -> None:
    """Print a line to the user."""
    _show(SAID + text, True)


def _show(text: str, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # a closed terminal or `head` must not end training
        print(text, file=unfailing(stream), flush=True)


def _drive(plan: WorkerPlan, dry_run: bool) -> int:
    """Run the job by our own driver."""
    if dry_run:
        script = plan.job.discover
        print(describe_plan(plan, run_script(Path(script), slots=plan.slots) if script else plan.hosts))
        return 0
    driver = Driver(plan, _show)
    before = {name: signal.getsignal(signal.Signals[name]) for name in _SIGNALS}
    for name in _SIGNALS:
        signal.signal(signal.Signals[name], lambda number, _: driver.signal(_SIGNALS[signal.Signals(number).name]))
    try:
        code = driver.run()
    finally:
        for name, old in before.items():
            signal.signal(signal.Signals[name], old)
    if code and plan.job.is_program and plan.job.elastic and not driver.had_round:
        say("with --elastic a program must call hvdtrain.torch's init and elastic.run; or use --to horovodrun")
    return code


def _found(start: Command) -> Command:
    """Return the command with its program's folder on PATH, where MPI's launchers look for their parts."""
    now = environ()
    program = shutil.which(start.argv[0], path=search_path(now))
    if program is None:
        what, expected = f"there is no {start.argv[0]} on this machine", f"{start.argv[0]} on PATH"
        raise LaunchError(what, expected=expected, next_step="see: hvdtrain doctor")
    folder = str(Path(program).parent)
    if shutil.which(Path(program).name, path=now.get("PATH", os.defpath)) == program:
        return start
    return Command(start.argv, {"PATH": os.pathsep.join([folder, now.get("PATH", os.defpath)]), **start.variables})


def _run(own: Sequence[str], start: Command, target: Target) -> int:
    say(f"+ {start}")
    variables = {**environ(), **start.variables, LAUNCH_OPTIONS: launch_options_text(own)}
    for name in secret_variables(variables) if target.shows_variables else ():
        del variables[name]
    # As a shell does. MPICH 5.0.2 does not pass the very last variable to ranks on other hosts.
    variables.pop("_", None)
    variables["_"] = start.argv[0]
    sys.stdout.flush()
    os.execvpe(start.argv[0], start.argv, variables)  # noqa: S606  (no shell, by intent)


def _takes_arguments(spec: JobSpec) -> bool:
    """Check whether training accepts its arguments; print its error if not. The job would only fail after the queue."""
    here = replace(spec, container=None)  # with this machine's hvdtrain
    done = run_program([*here.program, "--print_config"], None, folder=spec.folder)
    if done.code == USAGE:
        sys.stderr.write(done.err)
    return done.code != USAGE


def _submit(start: Script, target: Target) -> int:
    program = start.submit[0]
    if shutil.which(program, path=search_path(environ())) is None:
        next_step = f"write the script by --dry-run ... > FILE, and submit it where {program} is installed"
        raise LaunchError(f"there is no {program} on this machine", expected=f"{program} on PATH", next_step=next_step)
    if program == "qsub" and "pbs_version" not in (found := output([program, "--version"], environ())):
        raise LaunchError(
            "the qsub on this machine is not that of PBS Professional or OpenPBS",
            expected="qsub --version prints pbs_version",
            found=found.strip()[:100] or "nothing",
            next_step="Torque and Grid Engine are not supported: run mpirun in a script of your own",
        )
    variables = submit_environment(environ()) if target.shows_variables else environ()
    return subprocess.run(start.submit, input=start.text, env=variables, text=True, check=False).returncode


def merge(site: Site, argv: Sequence[str], typed: argparse.Namespace, target: str | None = None) -> argparse.Namespace:
    """Return the options of a profile, overridden by those of the command line. Repeated options add to its own.

    `typed` are the options of `argv` alone. With a `target`, options of the profile that it does not take are left out.

    Errors: LaunchError: the profile has an unknown option or an invalid value.
    """
    by_option = _words(site)
    if typed.hosts:
        by_option.pop("discover", None)
    takes = by_option.keys() if target is None else choose.options_of(target)
    return parse([*(word for name, some in by_option.items() if name in takes for word in some), *argv])


def _words(site: Site) -> dict[str, list[str]]:
    """Return the words of a command line with the options of a profile, by option; checked."""
    made = parser()
    made.exit_on_error = False
    declared = [(option, action) for action in made._actions for option in action.option_strings]
    long = {option: (option, action) for option, action in declared if action.dest not in _OF_COMMAND}
    words: dict[str, list[str]] = {}
    for name, value in site.options.items():
        option, action = long.get(f"--{name.replace('_', '-')}", ("", None))
        if action is None:
            near = made.nearest_option(f"--{name}").removeprefix("--")
            next_step = f"did you mean {near.replace('-', '_')}?" if near else "see hvdtrain launch --help"
            what = f"there is no option {name!r}"
            raise wrong(site.path, what, expected="a long name of an option, such as queue", next_step=next_step)
        if action.dest in words:
            raise wrong(site.path, f"options: {name} is given twice", expected="one spelling of each option")
        many = not isinstance(value, str)
        if many and not isinstance(action.default, list):
            raise wrong(site.path, f"options: {name} has several values", expected="one", found=", ".join(value))
        values = [value] if isinstance(value, str) else list(value)
        if action.nargs == 0:
            if values not in (["true"], ["false"]):
                raise wrong(site.path, f"options: {name} is invalid", expected="true or false", found=values[0])
            words[action.dest] = [option] if values == ["true"] else []
        else:
            words[action.dest] = [f"{option}={text}" for text in values]
        try:
            made.parse_known_args(words[action.dest])
        except argparse.ArgumentError as error:
            raise wrong(site.path, str(error)) from None
    words["env"] = [*words.get("env", []), *(f"--env={name}" for name in site.environment)]
    return words
