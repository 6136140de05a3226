"""Survey several hosts: start a probe on each, and ask all of them in parallel."""

from __future__ import annotations

import ipaddress
import itertools
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

import hvdtrain
from hvdtrain.doctor.facts.machine import Interface
from hvdtrain.doctor.hosts.host_probe import CONNECT_S, Attempt, HostReport, Listener
from hvdtrain.launch.agent_link import AgentLink
from hvdtrain.launch.hosts import LOCAL_NAMES
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.variables import agent_environment
from hvdtrain.launch.worker_plan import python_path, ssh_command

MODULE = "hvdtrain.doctor.hosts.host_probe"
GREET_S = 30.0
"""Time limit for ssh, Python, and the facts about a host."""
_ASK_S = 15.0
_CONNECT = ("-o", "ConnectTimeout=10")
_ANYWHERE = "192.0.2.1"  # an address that no host has (RFC 5737). Its route is the default route

T = TypeVar("T")


class NoAnswerError(Exception):
    """A host does not answer. The message is the reason, if known."""


class ProbeClient:
    """The connection to a probe that `argv` starts. Any thread may ask, one question at a time.

    Errors: OSError if the process cannot be started.
    """

    def __init__(self, host: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.link = AgentLink(host, argv, environment, lambda item: self._inbox.put(item[1]))
        self.link.start()

    def ask(self, what: str, timeout_s: float, **facts: Any) -> Any:
        """Ask a question. Errors: NoAnswerError if there is no answer, or the host reports an error."""
        number = next(self._numbers)
        deadline_s = time.monotonic() + timeout_s
        self.link.send("ask", number=number, what=what, **msgspec.to_builtins(facts))
        while True:
            message = self.receive("answer", deadline_s)
            if message["number"] != number:  # the late answer to a question that timed out
                continue
            if "error" in message:
                raise NoAnswerError(str(message["error"]))
            return message["value"]

    def kill(self) -> None:
        """Kill the connection. The probe ends as soon as it notices."""
        self.link.kill()
        self.link.close()

    def receive(self, kind: str, deadline_s: float) -> dict[str, Any]:
        """Return the next message of this kind. Errors: NoAnswerError if there is none."""
        while True:
            try:
                message = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise NoAnswerError("timed out: no answer") from None
            if message["type"] == "gone":
                self._inbox.put(message)  # for the next question
                raise NoAnswerError(str(message["why"]))
            if message["type"] == kind:
                return message


@dataclass(frozen=True)
class Survey:
    """The answers of all hosts, in the user's order."""

    slots: Mapping[str, int]  # by host, also of hosts that do not answer
    folder: str  # working folder of the ranks
    writer: str = ""  # host that wrote a test file into the folder; "" if none could
    lost: Mapping[str, str] = field(default_factory=dict)  # why a host does not answer, or no longer
    facts: Mapping[str, HostReport] = field(default_factory=dict)  # about each host that answers
    addresses: Mapping[str, str] = field(default_factory=dict)  # by which other hosts reach a host
    attempts: Mapping[str, Mapping[str, Attempt]] = field(default_factory=dict)  # connections, by source and target
    sees_file: Mapping[str, bool] = field(default_factory=dict)  # whether a host sees the file of `writer`

    def interface(self, host: str) -> Interface | None:
        """Return the interface with a host's address; None if it is unknown."""
        interfaces = self.facts[host].interfaces
        return next((one for one in interfaces if one.address == self.addresses.get(host)), None)


class Hosts:
    """Hosts with a probe until the end of the `with` block. One that fails to answer is asked no more (`lost`).

    `job` has the hosts, and how to reach them; `environment` is that of this process.
    """

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        self.lost: dict[str, str] = {}
        self._job, self._environment = job, environment
        self._probes: dict[str, ProbeClient] = {}
        self._pool = ThreadPoolExecutor(max(1, len(job.hosts)))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for probe in self._probes.values():
            if error:
                probe.kill()  # so that no thread waits for a host
            else:
                probe.link.close()  # without waiting for its end
        self._pool.shutdown()

    def survey(self) -> Survey:
        """Start the probes and ask all questions."""
        self._start()
        facts = self._ask_all(self._greet)
        addresses = self._addresses(facts)
        writer, sees_file = self._share_file()
        attempts = self._try_connections(addresses)
        job, lost = self._job, dict(self.lost)
        return Survey(job.hosts, job.folder, writer, lost, facts, addresses, attempts, sees_file)

    def _start(self) -> None:
        job = self._job
        for host in job.hosts:
            argv = ssh_command(host, MODULE, job.python, (*job.ssh_arguments, *_CONNECT))
            if host in (*LOCAL_NAMES, job.host):
                argv = [job.python, "-m", MODULE]
            try:
                self._probes[host] = ProbeClient(host, argv, agent_environment(self._environment))
            except OSError as error:
                self.lost[host] = str(error)

    def _greet(self, host: str) -> HostReport:
        probe = self._probes[host]
        probe.link.send("hello", folder=self._job.folder, path=python_path(self._environment))
        facts = probe.receive("says", time.monotonic() + GREET_S)["facts"]
        try:
            return msgspec.convert(facts, HostReport)
        except msgspec.ValidationError:
            theirs = facts.get("hvdtrain", "?")
            raise NoAnswerError(f"that host runs hvdtrain {theirs}, this one {hvdtrain.__version__}") from None

    def _addresses(self, facts: Mapping[str, HostReport]) -> dict[str, str]:
        """Return the address of each host.

        Remote hosts have the address that ssh connected to. This host has that of its route to the first of them.
        """
        remote = next((one.address for one in facts.values() if not _is_local(one.address)), _ANYWHERE)

        def address(host: str) -> str:
            if not _is_local(facts[host].address):
                return facts[host].address
            return str(self._ask(host, "toward", address=remote)) or "127.0.0.1"

        return self._ask_all(address)

    def _share_file(self) -> tuple[str, dict[str, bool]]:
        """Write a file into the working folder. Return the host that wrote it, and which hosts see it."""
        name, text = f"{self._job.folder}/.hvdtrain-doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
        for writer in list(self._probes):
            try:
                self._ask(writer, "write", file=name, text=text)
            except NoAnswerError:
                continue
            try:
                return writer, self._ask_all(lambda host: bool(self._ask(host, "look", file=name, text=text)))
            finally:
                with suppress(NoAnswerError, KeyError):  # the writer may be lost by now
                    self._ask(writer, "remove", file=name)
        return "", {}

    def _try_connections(self, addresses: Mapping[str, str]) -> dict[str, Mapping[str, Attempt]]:
        """Let each host connect to all others."""
        listeners = self._ask_all(lambda host: Listener(**self._ask(host, "listen", address=addresses[host])))

        def reach(host: str) -> Mapping[str, Attempt]:
            doors = {other: door for other, door in listeners.items() if other != host}
            timeout_s = _ASK_S + CONNECT_S * (1 + len(doors) / 32)
            attempts = self._ask(host, "reach", timeout_s, doors=doors)
            return {other: Attempt(**attempt) for other, attempt in attempts.items()}

        return self._ask_all(reach)

    def _ask(self, host: str, what: str, timeout_s: float = _ASK_S, **facts: Any) -> Any:
        return self._probes[host].ask(what, timeout_s, **facts)

    def _ask_all(self, work: Callable[[str], T]) -> dict[str, T]:
        """Call a function for each host that still answers, in parallel."""
        hosts = list(self._probes)

        def ask(host: str) -> T | NoAnswerError:
            try:
                return work(host)
            except NoAnswerError as error:
                return error

        answers = dict(zip(hosts, self._pool.map(ask, hosts), strict=True))
        for host, value in answers.items():
            if isinstance(value, NoAnswerError):
                self.lost[host] = str(value)
                self._probes.pop(host).kill()
        return {host: value for host, value in answers.items() if not isinstance(value, NoAnswerError)}


def _is_local(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
