"""Asking all hosts, each thing on all of them at once."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from hvdtrain.doctor.hosts.asking import Asked, SilentError
from hvdtrain.doctor.hosts.clock_offset import Offset, offset
from hvdtrain.doctor.hosts.host_facts import HostSays
from hvdtrain.doctor.hosts.peers import CONNECT_S, Door, Speed, Tried
from hvdtrain.launch.worker_plan import agent_environment, on_host, python_path

MODULE = "hvdtrain.doctor.hosts.host_probe"
GREET_S = 30.0
"""For ssh, Python, and what a host says of itself."""
_ASK_S = 15.0
_CONNECT = ("-o", "ConnectTimeout=10")
_LOOKS = 8
_ANYWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): its route is that of all that is not near."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """What is asked of whom.

    Attributes:
        hosts: slots by host, in the user's order.
        local: names that are this host.
        folder: where ranks will work.
        python: this Python.
        environment: of this process.
        ssh_port, ssh_options: as of `hvdtrain launch`.
    """

    hosts: Mapping[str, int]
    local: frozenset[str]
    folder: str
    python: str
    environment: Mapping[str, str]
    ssh_port: int | None = None
    ssh_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What all hosts have said; hosts in the user's order.

    Attributes:
        slots: by host, of all that were asked for.
        folder: where ranks will work.
        writer: the host that wrote a file there; "" where none could.
        lost: why a host could not be asked, or not any more.
        says: of itself.
        addresses: by which others reach it.
        offsets: of its clock.
        tried: connections from each host to each other.
        sees: whether it sees the file that `writer` wrote.
    """

    slots: Mapping[str, int]
    folder: str
    writer: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, HostSays] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    tried: Mapping[str, Mapping[str, Tried]] = field(default_factory=dict)
    sees: Mapping[str, bool] = field(default_factory=dict)


class Hosts:
    """Hosts whose probes run. Whoever falls silent is asked no more, and stands in `lost`."""

    def __init__(self, ask: Ask) -> None:
        self.lost: dict[str, str] = {}
        self.doors: dict[str, Door] = {}
        self._ask = ask
        self._links: dict[str, Asked] = {}
        self._pool = ThreadPoolExecutor(max(1, len(ask.hosts)))

    def survey(self) -> Survey:
        """Ask all that there is to know."""
        self._start()
        says = self._of_all(self._greet)
        addresses = self._addresses(says)
        offsets = self._of_all(self._offset)
        found = Survey(dict(self._ask.hosts), self._ask.folder, says=says, addresses=addresses, offsets=offsets)
        writer, sees = self._sharing()
        tried = self._reach(addresses)
        return replace(found, writer=writer, sees=sees, tried=tried, lost=dict(self.lost))

    def measure(self, source: str, target: str, budget_s: float) -> Speed:
        """How fast the way from one host to another is.

        Errors:
            SilentError: it cannot be measured.
        """
        door = asdict(self.doors[target])
        answer = self._links[source].ask("measure", 60.0 + budget_s, door=door, budget_s=budget_s)
        return Speed(**answer.value)

    def together(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """Do something for several at once."""
        return list(self._pool.map(work, items))

    def close(self) -> None:
        """Let all probes end."""
        for link in self._links.values():
            link.let_go()
        self._pool.shutdown()

    def give_up(self) -> None:
        """End all that waits for a host: somebody wants to stop."""
        for link in self._links.values():
            link.kill()

    def _start(self) -> None:
        ask = self._ask
        for host in ask.hosts:
            if host in ask.local:
                argv = [ask.python, "-m", MODULE]
            else:
                argv = on_host(host, MODULE, ask.python, ask.ssh_port, [*ask.ssh_options, *_CONNECT])
            try:
                self._links[host] = Asked(host, argv, agent_environment(ask.environment))
            except OSError as error:
                self.lost[host] = str(error)

    def _greet(self, host: str) -> HostSays:
        hello = {"folder": self._ask.folder, "path": list(python_path(self._ask.environment))}
        found = self._links[host].greet(hello, GREET_S)
        try:
            return HostSays.of_json(found)
        except (KeyError, TypeError):
            raise SilentError(f"another hvdtrain is there: {found.get('hvdtrain', '?')}") from None

    def _offset(self, host: str) -> Offset:
        looks = []
        for _ in range(_LOOKS):
            answer = self._links[host].ask("clock", _ASK_S)
            looks.append((answer.sent_ns, int(answer.value), answer.came_ns))
        return offset(looks)

    def _addresses(self, says: Mapping[str, HostSays]) -> dict[str, str]:
        """By which hosts reach each other: by which ssh came; of this host, by which it goes to the first of them."""
        far = next((said.address for said in says.values() if not _near(said.address)), _ANYWHERE)

        def address(host: str) -> str:
            if not _near(says[host].address):
                return says[host].address
            return str(self._links[host].ask("toward", _ASK_S, address=far).value) or "127.0.0.1"

        return self._of_all(address)

    def _sharing(self) -> tuple[str, dict[str, bool]]:
        """Which host wrote a file into the working folder, and which others see it."""
        name, text = f"{self._ask.folder}/.hvdtrain-doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
        for writer in list(self._links):
            try:
                self._links[writer].ask("write", _ASK_S, file=name, text=text)
            except SilentError:
                continue
            try:
                return writer, self._of_all(
                    lambda host: bool(self._links[host].ask("look", _ASK_S, file=name, text=text).value)
                )
            finally:
                with suppress(SilentError, KeyError):  # it may have been lost meanwhile
                    self._links[writer].ask("remove", _ASK_S, file=name)
        return "", {}

    def _reach(self, addresses: Mapping[str, str]) -> dict[str, Mapping[str, Tried]]:
        """Have each host try a connection to each other."""

        def listen(host: str) -> Door:
            return Door(**self._links[host].ask("listen", _ASK_S, address=addresses[host]).value)

        self.doors = self._of_all(listen)

        def reach(host: str) -> Mapping[str, Tried]:
            doors = {other: asdict(door) for other, door in self.doors.items() if other != host}
            timeout_s = _ASK_S + CONNECT_S * (1 + len(doors) / 32)
            found = self._links[host].ask("reach", timeout_s, doors=doors).value
            return {other: Tried(**tried) for other, tried in found.items()}

        return self._of_all(reach)

    def _of_all(self, work: Callable[[str], T]) -> dict[str, T]:
        """Do something for each host that still answers, all at once."""
        hosts = list(self._links)

        def done(host: str) -> T | SilentError:
            try:
                return work(host)
            except SilentError as error:
                return error

        found = dict(zip(hosts, self.together(done, hosts), strict=True))
        for host, value in found.items():
            if isinstance(value, SilentError):
                self.lost[host] = str(value)
                self._links.pop(host).kill()
        return {host: value for host, value in found.items() if not isinstance(value, SilentError)}


@contextmanager
def asked(ask: Ask) -> Iterator[Hosts]:
    """The hosts, until the end of the block."""
    hosts = Hosts(ask)
    try:
        yield hosts
    except BaseException:
        hosts.give_up()
        raise
    finally:
        hosts.close()


def _near(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
