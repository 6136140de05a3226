"""An ssh server on each host of `two_hosts`, and the client that reaches it; the user's own keys are left alone.

SHLVL keeps bash from reading the user's ~/.bashrc. pyenv takes a lock there: a session that is killed meanwhile leaves
it behind, and each later session then waits for 60 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.host import OWN, Host, tool, until, variables

CLIENT = OWN / "bin" / "ssh"
_SERVER = """\
ListenAddress {address}:22
HostKey {own}/host_key
AuthorizedKeysFile {own}/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
SetEnv PATH={path} TMPDIR={tmp} SHLVL=1
"""
_CLIENT = """\
Host *
  User root
  IdentityFile {own}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {own}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 20
  LogLevel ERROR
"""
_LAUNCHED_BY = '#!/bin/sh\nexec {ssh} -F {own}/ssh_config -o StrictHostKeyChecking=yes "$@"\n'


def serve_ssh(hosts: Sequence[Host]) -> None:
    """Start a server on each host, which lets root of each of them in; ``ssh`` found first on PATH there reaches it."""
    keys = {host: (_key(host, "host_key"), _key(host, "user_key")) for host in hosts}
    known = "".join(f"{host.name},{host.address} {key}" for host, (key, _) in keys.items())
    allowed = "".join(key for _, key in keys.values())
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    for host in hosts:
        path, tmp = variables()["PATH"], OWN / "tmp"
        host.write(OWN / "sshd_config", _SERVER.format(address=host.address, own=OWN, path=path, tmp=tmp))
        host.write(OWN / "ssh_config", _CLIENT.format(own=OWN))
        host.write(OWN / "authorized_keys", allowed)
        host.write(OWN / "known_hosts", known)
        host.write(CLIENT, _LAUNCHED_BY.format(ssh=tool("ssh"), own=OWN), 0o755)
        host.write(OWN / "hosts", names, 0o644)
        host.configure("mount", "--bind", str(OWN / "hosts"), "/etc/hosts")
        host.seen(Path("/run/sshd")).mkdir()  # where the server drops its rights
        host.configure("sshd", "-f", str(OWN / "sshd_config"), "-E", str(OWN / "sshd.log"))
    for host in hosts:
        until(lambda: "Server listening" in _log(host), f"the ssh server of {host.name}: {_log(host)}")  # noqa: B023


def _key(host: Host, name: str) -> str:
    host.configure("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", str(OWN / name))
    return host.seen(OWN / f"{name}.pub").read_text()


def _log(host: Host) -> str:
    file = host.seen(OWN / "sshd.log")
    return file.read_text() if file.exists() else ""
