"""Explain errors of ssh, the shell and Python on a host that does not answer. Pure."""

from __future__ import annotations

import re
import shlex

from hvdtrain.doctor.finding import Finding

_CAUSES = (
    (
        "Could not resolve hostname|Name or service not known",
        "this host name has no address",
        "getent hosts {machine}; then correct the name in --hosts, /etc/hosts, the DNS or ~/.ssh/config",
    ),
    (
        "Connection refused",
        "the host is up, but no ssh server listens on that port",
        "on {host}: systemctl start ssh (or sshd); --ssh-port PORT if it uses another port",
    ),
    (
        "HOST IDENTIFICATION HAS CHANGED|Offending .* key in|[Hh]ost key for .* has changed",
        "its host key differs from the known one: it was reinstalled, or the connection is intercepted",
        "ask the administrator of {host} whether it was reinstalled; if so: ssh-keygen -R {host}{key_file}, then log "
        "in once: ssh {host} true",
    ),
    (
        "[Hh]ost key verification failed|host key is known",
        "its host key is not known, and doctor cannot ask you to confirm it",
        "log in once and compare the fingerprint: ssh {host} true",
    ),
    (
        r"Permission denied \(|Too many authentication failures|No more authentication methods",
        "it does not accept this user without a password",
        "ssh-copy-id {host}; or name the user in --hosts USER@{machine}",
    ),
    (
        "No module named '?hvdtrain'?$",
        "Python starts, but hvdtrain is neither installed in it nor in an existing folder of PYTHONPATH",
        "install hvdtrain there in the same folder as here, or on a file system that all hosts mount",
    ),
    (
        r"exec: |: Permission denied|not found|cannot execute|Exec format error|sh:.*[Nn]o such file or directory",
        "this Python does not exist there under the same path",
        "install the same environment there under the same path, or on a file system that all hosts mount",
    ),
    (
        r"that host runs hvdtrain|No module named 'hvdtrain\.",
        "another version of hvdtrain is installed there, and its answers are not compatible",
        "install the same version of hvdtrain on all hosts",
    ),
    (
        "No module named",
        "hvdtrain is installed there, but a package that it needs is missing",
        "install the same environment there as here",
    ),
    (
        "[Tt]imed out|No route to host|[Nn]etwork is unreachable|[Cc]onnection to .* closed|timed out: no answer",
        "no answer: the host is down, a firewall drops packets, or its disk or login script hangs",
        "ping {machine}; then: ssh {host} true",
    ),
    (
        "kex_exchange|Connection (reset|closed)|Broken pipe",
        "its ssh server closes connections before login: too many at once, or this host is not allowed",
        "on {host}: journalctl -u ssh; check MaxStartups in sshd_config and /etc/hosts.deny",
    ),
    (
        "Bad owner or permissions|UNPROTECTED PRIVATE KEY|Bad configuration option|command-line",
        "the ssh configuration of this host is invalid",
        "correct what the message names; then: ssh {host} true",
    ),
    ("", "it does not answer", "ssh {host} true"),
)
"""Causes: pattern of the message, explanation, fix. ``{machine}`` is the host without a user name."""


def explain_ssh_failure(host: str, message: str) -> Finding:
    """Return the finding for a host that does not answer. ``message``: last lines of ssh, the shell or Python."""
    why, fix = next((why, fix) for pattern, why, fix in _CAUSES if re.search(pattern, message))
    key_file = re.search(r"Offending \S+ key in (\S+?):\d+", message)
    fix = fix.format(
        host=host,
        machine=host.rpartition("@")[2],
        key_file=f" -f {shlex.quote(key_file[1])}" if key_file else "",
    )
    return Finding(f"ssh {host}", "broken", _last_line(message), why, fix)


def _last_line(message: str) -> str:
    """Return the last meaningful line of a message."""
    parts = [part.strip() for part in message.split("; ") if part.strip(" @")]
    meaningful = [part for part in parts if not part.startswith(("Host key verification", "Please contact"))]
    return (meaningful or parts or ["no message"])[-1]
