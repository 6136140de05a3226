from __future__ import annotations

import pytest

from hvdtrain.doctor.hosts.checks import explain_ssh_failure

CHANGED = (
    "The fingerprint for the ED25519 key sent by the remote host is; SHA256:x.; Please contact your system "
    "administrator.; Add correct host key in /root/.ssh/known_hosts to get rid of this message.; Offending ED25519 key "
    "in /root/my hosts:4; Host key for b has changed and you have requested strict checking.; Host key verification "
    "failed."
)


@pytest.mark.parametrize(
    ("said", "why", "fix"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "no address", "getent hosts b"),
        ("ssh: connect to host b port 22: Connection refused", "no ssh server", "--ssh-port"),
        ("ssh: connect to host b port 22: Connection timed out", "no answer", "ping b"),
        ("ssh: connect to host b port 22: No route to host", "no answer", "ping b"),
        ("timed out: no answer", "login script hangs", "ssh u@b true"),
        (CHANGED.replace("my hosts", "hosts"), "differs from the known one", "ssh-keygen -R u@b -f /root/hosts"),
        ("Host key verification failed.", "is not known", "ssh u@b true"),
        ("No ED25519 host key is known for b and you have requested strict checking.", "not known", "ssh u@b true"),
        ("u@b: Permission denied (publickey,password).", "without a password", "ssh-copy-id u@b"),
        ("Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures", "password", "ssh-copy-id"),
        ("kex_exchange_identification: read: Connection reset by peer", "closes connections", "MaxStartups"),
        ("bash: line 1: exec: /v/bin/python: not found", "does not exist there", "same path"),
        ("bash: line 1: /v/bin/python: No such file or directory", "does not exist there", "same path"),
        ("zsh:1: no such file or directory: /v/bin/python", "does not exist there", "same path"),
        ("fish: Unknown command: /v/bin/python; exec: cannot", "does not exist there", "same path"),
        ("bash: line 1: /v/bin/python: Permission denied", "does not exist there", "same path"),
        ("ModuleNotFoundError: No module named 'hvdtrain'", "hvdtrain or a package", "the same environment"),
        ("ModuleNotFoundError: No module named 'hvdtrain.doctor.hosts'", "of another version", "the same environment"),
        ("ModuleNotFoundError: No module named 'psutil'", "a package that it needs is missing", "the same folder"),
        ("that host runs hvdtrain 0.0.1, this one 0.1.0", "of another version", "the same environment"),
        ("Bad configuration option: x", "ssh configuration", "correct what the message names"),
        ("something new", "does not answer", "ssh u@b true"),
    ],
)
def test_each_message_is_reported_with_its_fix(said: str, why: str, fix: str) -> None:
    finding = explain_ssh_failure("u@b", said)
    assert finding.level == "broken" and finding.name == "ssh u@b"
    assert why in finding.why and fix in finding.fix, finding


def test_the_most_specific_line_is_shown() -> None:
    assert explain_ssh_failure("b", CHANGED).found.startswith("Host key for b has changed")
    assert explain_ssh_failure("b", "").found == "no message"
