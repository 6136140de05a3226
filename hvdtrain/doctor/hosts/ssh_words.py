"""What ssh, a shell or Python said when a host could not be asked, and what mends that. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.doctor.finding import Finding


@dataclass(frozen=True)
class _Cause:
    """One way to fail.

    Attributes:
        words: in what was said, any of them.
        why: what it means.
        mend: what to do, of the host and what was said.
    """

    words: str
    why: str
    mend: Callable[[str, str], str]


def _machine(host: str) -> str:
    """A host's name without the user's."""
    return host.rpartition("@")[2]


def _log_in(host: str, said: str) -> str:
    return f"ssh {host} true"


def _forget(host: str, said: str) -> str:
    """The command that forgets a key, of the file that ssh has named."""
    file = re.search(r"Offending \S+ key in (\S+?):\d+", said)
    where = f" -f {shlex.quote(file[1])}" if file else ""
    return (
        f"ask who runs {host} whether it was set up anew; if so: ssh-keygen -R {host}{where}, then once by hand: "
        f"ssh {host} true"
    )


_CAUSES = (
    _Cause(
        "Could not resolve hostname|Name or service not known",
        "its name has no address here",
        lambda host, said: (
            f"getent hosts {_machine(host)}; then mend the name in --hosts, /etc/hosts, the DNS or ~/.ssh/config"
        ),
    ),
    _Cause(
        "Connection refused",
        "the host is there, but no ssh server on that port",
        lambda host, said: f"on {host}: systemctl start ssh (or sshd); --ssh-port PORT where it has another port",
    ),
    _Cause(
        "HOST IDENTIFICATION HAS CHANGED|Offending .* key in|[Hh]ost key for .* has changed",
        "its host key is not the one that is known here: it was set up anew, or somebody stands between",
        _forget,
    ),
    _Cause(
        "[Hh]ost key verification failed|host key is known",
        "its host key is not known here, and nobody is there to ask whether it is right",
        lambda host, said: f"once by hand, comparing the fingerprint: {_log_in(host, said)}",
    ),
    _Cause(
        r"Permission denied \(|Too many authentication failures|No more authentication methods",
        "it does not let this user in without a password",
        lambda host, said: f"ssh-copy-id {host}; or name the user in --hosts USER@{_machine(host)}",
    ),
    _Cause(
        "No module named '?hvdtrain'?$",
        "Python starts there, but hvdtrain is not installed in it, nor in a folder of PYTHONPATH that is there too",
        lambda host, said: "install hvdtrain there as here, in the same folder; or put it on a file system of all",
    ),
    _Cause(
        r"exec: |: Permission denied|not found|cannot execute|Exec format error|sh:.*[Nn]o such file or directory",
        "this Python is not there under the same path",
        lambda host, said: "install the same environment there, under the same path; or on a file system of all",
    ),
    _Cause(
        r"another hvdtrain is there|No module named 'hvdtrain\.",
        "another hvdtrain is there, and what it says is not understood here",
        lambda host, said: "install the same hvdtrain on all hosts",
    ),
    _Cause(
        "[Tt]imed out|No route to host|[Nn]etwork is unreachable|[Cc]onnection to .* closed|timed out: no word",
        "nothing comes back: the host is down, a firewall drops what is sent, or its disk or login script hangs",
        lambda host, said: f"ping {_machine(host)}; then: {_log_in(host, said)}",
    ),
    _Cause(
        "kex_exchange|Connection (reset|closed)|Broken pipe",
        "its ssh server hangs up before anybody has logged in: too many at once, or hosts it does not let in",
        lambda host, said: f"on {host}: journalctl -u ssh; MaxStartups of sshd_config, /etc/hosts.deny",
    ),
    _Cause(
        "Bad owner or permissions|UNPROTECTED PRIVATE KEY|Bad configuration option|command-line",
        "ssh does not like how it is set up here",
        lambda host, said: f"mend what it says; then: {_log_in(host, said)}",
    ),
)


def lost(host: str, said: str) -> Finding:
    """What to tell of a host that could not be asked.

    Args:
        host: its name.
        said: by ssh, the shell or Python, the last lines.
    """
    for cause in _CAUSES:
        if re.search(cause.words, said):
            return Finding(f"ssh {host}", "broken", _last(said), cause.why, cause.mend(host, said))
    return Finding(f"ssh {host}", "broken", _last(said), "it cannot be asked anything", _log_in(host, said))


def _last(said: str) -> str:
    """The last thing that was said that says something."""
    parts = [part.strip() for part in said.split("; ") if part.strip(" @")]
    telling = [part for part in parts if not part.startswith(("Host key verification", "Please contact"))]
    return (telling or parts or ["it says nothing"])[-1]
