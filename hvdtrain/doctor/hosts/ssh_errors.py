"""Explain errors of ssh, the shell and Python on a host that does not answer. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.doctor.finding import Finding


@dataclass(frozen=True)
class _Cause:
    """A cause of failure.

    Attributes:
        pattern: regular expression that the error message matches.
        why: explanation.
        fix: returns the fix, given the host and the message.
    """

    pattern: str
    why: str
    fix: Callable[[str, str], str]


def _machine(host: str) -> str:
    """Return a host without the user name."""
    return host.rpartition("@")[2]


def _log_in(host: str, message: str) -> str:
    return f"ssh {host} true"


def _remove_key(host: str, message: str) -> str:
    """Return the command that removes the key from the file that ssh names."""
    file = re.search(r"Offending \S+ key in (\S+?):\d+", message)
    where = f" -f {shlex.quote(file[1])}" if file else ""
    return (
        f"ask the administrator of {host} whether it was reinstalled; if so: ssh-keygen -R {host}{where}, then log in "
        f"once: ssh {host} true"
    )


_CAUSES = (
    _Cause(
        "Could not resolve hostname|Name or service not known",
        "this host name has no address",
        lambda host, message: (
            f"getent hosts {_machine(host)}; then correct the name in --hosts, /etc/hosts, the DNS or ~/.ssh/config"
        ),
    ),
    _Cause(
        "Connection refused",
        "the host is up, but no ssh server listens on that port",
        lambda host, message: f"on {host}: systemctl start ssh (or sshd); --ssh-port PORT if it uses another port",
    ),
    _Cause(
        "HOST IDENTIFICATION HAS CHANGED|Offending .* key in|[Hh]ost key for .* has changed",
        "its host key differs from the known one: it was reinstalled, or the connection is intercepted",
        _remove_key,
    ),
    _Cause(
        "[Hh]ost key verification failed|host key is known",
        "its host key is not known, and doctor cannot ask you to confirm it",
        lambda host, message: f"log in once and compare the fingerprint: {_log_in(host, message)}",
    ),
    _Cause(
        r"Permission denied \(|Too many authentication failures|No more authentication methods",
        "it does not accept this user without a password",
        lambda host, message: f"ssh-copy-id {host}; or name the user in --hosts USER@{_machine(host)}",
    ),
    _Cause(
        "No module named '?hvdtrain'?$",
        "Python starts, but hvdtrain is neither installed in it nor in an existing folder of PYTHONPATH",
        lambda host, message: (
            "install hvdtrain there in the same folder as here, or on a file system that all hosts mount"
        ),
    ),
    _Cause(
        r"exec: |: Permission denied|not found|cannot execute|Exec format error|sh:.*[Nn]o such file or directory",
        "this Python does not exist there under the same path",
        lambda host, message: (
            "install the same environment there under the same path, or on a file system that all hosts mount"
        ),
    ),
    _Cause(
        r"that host runs hvdtrain|No module named 'hvdtrain\.",
        "another version of hvdtrain is installed there, and its answers are not compatible",
        lambda host, message: "install the same version of hvdtrain on all hosts",
    ),
    _Cause(
        "No module named",
        "hvdtrain is installed there, but a package that it needs is missing",
        lambda host, message: "install the same environment there as here",
    ),
    _Cause(
        "[Tt]imed out|No route to host|[Nn]etwork is unreachable|[Cc]onnection to .* closed|timed out: no answer",
        "no answer: the host is down, a firewall drops packets, or its disk or login script hangs",
        lambda host, message: f"ping {_machine(host)}; then: {_log_in(host, message)}",
    ),
    _Cause(
        "kex_exchange|Connection (reset|closed)|Broken pipe",
        "its ssh server closes connections before login: too many at once, or this host is not allowed",
        lambda host, message: f"on {host}: journalctl -u ssh; check MaxStartups in sshd_config and /etc/hosts.deny",
    ),
    _Cause(
        "Bad owner or permissions|UNPROTECTED PRIVATE KEY|Bad configuration option|command-line",
        "the ssh configuration of this host is invalid",
        lambda host, message: f"correct what the message names; then: {_log_in(host, message)}",
    ),
)


def explain_ssh_failure(host: str, message: str) -> Finding:
    """Return the finding for a host that does not answer.

    Args:
        host: its name.
        message: last lines of ssh, the shell or Python.
    """
    for cause in _CAUSES:
        if re.search(cause.pattern, message):
            return Finding(f"ssh {host}", "broken", _last_line(message), cause.why, cause.fix(host, message))
    return Finding(f"ssh {host}", "broken", _last_line(message), "it does not answer", _log_in(host, message))


def _last_line(message: str) -> str:
    """Return the last meaningful line of a message."""
    parts = [part.strip() for part in message.split("; ") if part.strip(" @")]
    meaningful = [part for part in parts if not part.startswith(("Host key verification", "Please contact"))]
    return (meaningful or parts or ["no message"])[-1]
