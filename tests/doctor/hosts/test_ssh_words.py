"""What ssh, shells and Python say, and what the user is told."""

from __future__ import annotations

import pytest

from hvdtrain.doctor.hosts.ssh_words import lost

CHANGED = (
    "The fingerprint for the ED25519 key sent by the remote host is; SHA256:x.; Please contact your system "
    "administrator.; Add correct host key in /root/.ssh/known_hosts to get rid of this message.; Offending ED25519 key "
    "in /root/my hosts:4; Host key for b has changed and you have requested strict checking.; Host key verification "
    "failed."
)


@pytest.mark.parametrize(
    ("said", "why", "mend"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "no address", "getent hosts b"),
        ("ssh: connect to host b port 22: Connection refused", "no ssh server", "--ssh-port"),
        ("ssh: connect to host b port 22: Connection timed out", "nothing comes back", "ping b"),
        ("ssh: connect to host b port 22: No route to host", "nothing comes back", "ping b"),
        ("timed out: no word of it", "login script hangs", "ssh u@b true"),
        (CHANGED.replace("my hosts", "hosts"), "not the one that is known", "ssh-keygen -R u@b -f /root/hosts"),
        ("Host key verification failed.", "not known here", "ssh u@b true"),
        ("No ED25519 host key is known for b and you have requested strict checking.", "not known", "ssh u@b true"),
        ("u@b: Permission denied (publickey,password).", "without a password", "ssh-copy-id u@b"),
        ("Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures", "password", "ssh-copy-id"),
        ("kex_exchange_identification: read: Connection reset by peer", "hangs up", "MaxStartups"),
        ("bash: line 1: exec: /v/bin/python: not found", "not there under the same path", "same path"),
        ("bash: line 1: /v/bin/python: No such file or directory", "not there under the same path", "same path"),
        ("zsh:1: no such file or directory: /v/bin/python", "not there under the same path", "same path"),
        ("fish: Unknown command: /v/bin/python; exec: cannot", "not there under the same path", "same path"),
        ("bash: line 1: /v/bin/python: Permission denied", "not there under the same path", "same path"),
        ("ModuleNotFoundError: No module named 'hvdtrain'", "hvdtrain is not installed", "install hvdtrain there"),
        ("ModuleNotFoundError: No module named 'hvdtrain.doctor.hosts'", "another hvdtrain", "the same hvdtrain"),
        ("another hvdtrain is there: 0.0.1", "not understood", "the same hvdtrain"),
        ("Bad configuration option: x", "how it is set up here", "mend what it says"),
        ("something new", "cannot be asked", "ssh u@b true"),
    ],
)
def test_what_is_said_is_told_with_its_cure(said: str, why: str, mend: str) -> None:
    finding = lost("u@b", said)
    assert finding.level == "broken" and finding.name == "ssh u@b"
    assert why in finding.why and mend in finding.mend, finding


def test_the_line_that_says_most_is_shown() -> None:
    assert lost("b", CHANGED).found == "Host key for b has changed and you have requested strict checking."
    assert lost("b", "").found == "it says nothing"
