"""Two real hosts on this machine, joined by a cable that can be throttled and cut. Needs root.

    with two_hosts(rate="1gbit") as hosts:
        hosts.mpirun([sys.executable, "-m", "hvdtrain", "--train.steps=5"])           # one rank on each
        hosts.horovodrun([sys.executable, "train.py"], environment={"NAME": "is passed to the ranks"})
        hosts.a.run(["ssh", "b", "hostname"])                                         # any program on one of them
        with hosts.a.popen(hosts.mpirun_command(argv)) as job: ...                    # without waiting
        hosts.throttle("100mbit"); hosts.throttle(None); hosts.cut(); hosts.mend(); hosts.wall(hosts.a)
        hosts.a.sent_bytes(), hosts.b.received_bytes()                                # of the interface, with headers

The hosts are called ``a`` and ``b``, at 10.77.0.1 and 10.77.0.2, their interface is `LINK`. Each has processes, a
network, a host name, ``/etc/hosts``, ``/run`` and ``/dev/shm`` of its own, and half of the cores; the disk they share.
They send by TCP's CUBIC, as Linux does where nobody has chosen: BBR takes a token bucket's burst for the link's speed.
All of it goes when the block is left and when this process is killed: see `host`. Several pairs may be up at once.

A throttled end sends at `rate` (as ``tc`` writes it: 100mbit, 1gbit), after a burst of 256 KiB; what waits longer than
50 ms is dropped. A cut link loses what is sent, silently, as a cable that somebody pulled from a switch does. A wall
loses only what would begin a connection, but ssh's, as the firewalls of many hosts do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.host import LINK, OWN, Host, UnavailableError, beside_python, one_host, variables
from tests.support.sshd import CLIENT, serve_ssh
from tests.support.warm import is_warm

__all__ = ["LINK", "OWN", "Host", "TwoHosts", "UnavailableError", "two_hosts", "variables"]

_CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_PASSED = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS", "OMP_NUM_THREADS", "HOME")


class TwoHosts:
    """The hosts `a` and `b`, and the link between them."""

    def __init__(self, a: Host, b: Host, rate: str | None) -> None:
        self.a = a
        self.b = b
        self._rate = rate
        self._cut = False

    def throttle(self, rate: str | None) -> None:
        """Let each end send at most at `rate`; None: as fast as it can."""
        self._rate = rate
        self._shape()

    def cut(self) -> None:
        """Lose all that is sent, in both directions."""
        self._cut = True
        self._shape()

    def wall(self, host: Host) -> None:
        """Lose what a host sends to begin a connection by TCP, but for those of ssh; until `mend`."""
        tc = ("tc", "qdisc", "replace", "dev", LINK)
        host.configure(*tc, "root", "handle", "1:", "htb", "default", "1")
        for number in ("1", "2"):
            made = ("parent", "1:", "classid", f"1:{number}", "htb", "rate", "10gbit", "quantum", "60000")
            host.configure("tc", "class", "add", "dev", LINK, *made)
        host.configure(*tc, "parent", "1:2", "blackhole")
        tcp = ("protocol", "ip", "u32", "match", "ip", "protocol", "6", "0xff")
        rules = ((("match", "ip", "dport", "22", "0xffff"), "1"), (("match", "u8", "0x02", "0x12", "at", "33"), "2"))
        for order, (rule, number) in enumerate(rules, 1):
            where = ("parent", "1:", "prio", str(order), *tcp, *rule, "flowid", f"1:{number}")
            host.configure("tc", "filter", "add", "dev", LINK, *where)

    def mend(self) -> None:
        """Undo `cut` and `wall`."""
        self._cut = False
        self._shape()

    def mpirun_command(
        self, argv: Sequence[str], *, per_host: int = 1, environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """What starts `argv` on both hosts by Open MPI 4 over ssh, to be run on `a` with the same `environment`."""
        mpirun = Path(beside_python("mpirun"))
        parameters = {"plm_rsh_agent": str(CLIENT), "btl_tcp_if_include": LINK, "oob_tcp_if_include": LINK}
        passed = dict.fromkeys([*(n for n in _PASSED if n in variables(environment)), *(environment or {})])
        return [
            *(str(mpirun), "--allow-run-as-root", "--prefix", str(mpirun.parent.parent)),
            *("-np", str(2 * per_host), *self._hosts(per_host), "--bind-to", "none"),
            *(part for name, value in parameters.items() for part in ("--mca", name, value)),
            *(part for name in passed for part in ("-x", name)),
            *argv,
        ]

    def warm_python(self) -> list[str]:
        """Return the words that start a fork of a warm Python on either host."""
        on_a, on_b = self.a.warm_python(), self.b.warm_python()
        assert on_a == on_b
        return on_a

    def mpirun(
        self, argv: Sequence[str], *, per_host: int = 1, environment: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on both hosts by mpirun and wait; `how`: see `Host.run`. hvdtrain runs in forks: see `warm`."""
        if list(argv[:3]) == [sys.executable, "-m", "hvdtrain"] and is_warm(environment or {}):
            argv = [*self.warm_python(), *argv[1:]]
        command = self.mpirun_command(argv, per_host=per_host, environment=environment)
        return self._launch(command, environment=environment, **how)

    def horovodrun(self, argv: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run `argv` on both hosts by horovodrun over Gloo and wait; `how`: see `Host.run`."""
        options = ["--gloo", "-np", "2", *self._hosts(1), "--network-interface", LINK, "--disable-cache"]
        return self._launch([beside_python("horovodrun"), *options, *argv], **how)

    def _launch(self, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        there = self.b.processes()
        try:
            return self.a.run(command, **how)
        except BaseException:
            self.b.end(self.b.processes() - there)
            raise

    def _hosts(self, per_host: int) -> list[str]:
        return ["-H", ",".join(f"{host.name}:{per_host}" for host in (self.a, self.b))]

    def _shape(self) -> None:
        for host in (self.a, self.b):
            bucket = ("tbf", "rate", str(self._rate), "burst", "256kb", "latency", "50ms")
            kind = ("blackhole",) if self._cut else bucket if self._rate else ("noqueue",)
            host.configure("tc", "qdisc", "replace", "dev", LINK, "root", *kind)


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[TwoHosts]:
    """Two hosts for as long as the block lasts; `rate`: see `TwoHosts.throttle`.

    Errors:
        UnavailableError: not root, no right to make namespaces, or a tool is missing.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    with ExitStack() as stack:
        a = stack.enter_context(one_host("a", "10.77.0.1", cores[:half]))
        b = stack.enter_context(one_host("b", "10.77.0.2", cores[half:] or cores))
        a.pair(b)
        for host in (a, b):
            host.configure("ip", "address", "add", f"{host.address}/24", "dev", LINK)
            host.configure("ip", "link", "set", LINK, "up")
            if "cubic" in _CONGESTION.read_text().split():
                host.configure("ip", "route", "replace", "10.77.0.0/24", "dev", LINK, "congctl", "cubic")
        serve_ssh((a, b))
        hosts = TwoHosts(a, b, rate)
        hosts.throttle(rate)
        yield hosts
