"""The driver of an elastic job: executes the commands of its `Membership` and reports events to it.

One thread decides. Others read from the agents, write to them, show lines, and run the discovery script. Only this
process holds the state of the job, so it needs no agreement with others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch import job
from hvdtrain.launch.agent_link import END_S, AgentLink, Relay
from hvdtrain.launch.hosts import run_script
from hvdtrain.launch.job_output import EventLog, Screen
from hvdtrain.launch.membership import Membership
from hvdtrain.launch.worker_plan import WorkerPlan, agent_command, hello_message, rank_environment, starting_environment
from hvdtrain.runtime.channel import BEAT_S, encode_message
from hvdtrain.runtime.interfaces import interface_of, shared_fabric, source_to

_TICK_S = 0.1
_REST = 9
"""Pause after a tick, in times its duration, but no longer than the time between two ticks without an event."""
_ASK_S = 1.0


class Driver:
    """A job. `show` is called with each line, and whether it is for stderr."""

    def __init__(self, plan: WorkerPlan, show: Callable[[str, bool], None]) -> None:
        self._plan = plan
        self._screen = Screen(show)
        self._say = self._screen.say
        self._inbox: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._members = Membership(plan.limits, plan.local, time.monotonic())
        self._links: dict[str, AgentLink] = {}
        self._old: list[AgentLink] = []
        self._relay = Relay(self._send_all, self._send)
        self._log = EventLog(plan.events)
        self._ranks: dict[int, int] = {}
        self._code: int | None = None
        self._beat_s = self._next_tick_s = 0.0
        self._over = threading.Event()

    @property
    def had_round(self) -> bool:
        """Check whether there was a round."""
        return self._members.job.round > 0

    def signal(self, name: str) -> None:
        """Queue a signal; safe in a signal handler."""
        self._put(partial(self._signal, name))

    def _put(self, handle: Callable[[], None]) -> None:
        """Queue what the deciding thread shall do, with the time; any thread calls it."""
        self._inbox.put((time.monotonic(), handle))

    def run(self) -> int:
        """Run the job to its end; return the exit code. Raise LaunchError if the discovery script fails at first."""
        try:
            self._find_hosts()
            heard_s = time.monotonic()
            while self._code is None:
                began_s = time.monotonic()
                self._execute(self._members.tick(heard_s))
                self._next_tick_s = time.monotonic() + min(_TICK_S, _REST * (time.monotonic() - began_s))
                if (now_s := time.monotonic()) - self._beat_s >= BEAT_S:
                    self._beat_s = now_s
                    self._send_all("beat")
                heard_s = self._handle_all()
            return self._code
        finally:
            self._over.set()
            self._close()

    def _find_hosts(self) -> None:
        script = self._plan.job.discover
        if script is None:
            return self._set_hosts(dict(self._plan.hosts))
        ask = partial(run_script, Path(script), slots=self._plan.slots)
        self._set_hosts(ask())
        threading.Thread(target=self._watch_script, args=(ask,), name="discovery", daemon=True).start()

    def _watch_script(self, ask: Callable[[], dict[str, int]]) -> None:
        """Ask for the hosts repeatedly until the job is over; the last answer stays valid while the script fails."""
        last: dict[str, int] = {}
        error = ""
        while not self._over.wait(_ASK_S):
            try:
                hosts = ask()
            except LaunchError as wrong:
                if str(wrong) != error:
                    error = str(wrong)
                    self._say(f"{error}\n  the hosts stay the same")
                continue
            if hosts != last or error:
                last, error = hosts, ""
                self._put(partial(self._set_hosts, hosts))

    def _set_hosts(self, hosts: dict[str, int]) -> None:
        self._members.hosts_discovered(hosts, time.monotonic())

    def _signal(self, name: str) -> None:
        if name in ("SIGUSR1", "SIGUSR2"):
            for worker in self._members.job.workers.values():
                self._send(worker.host, "signal", worker=worker.number, name=name)
        else:
            self._members.signal_received(name, time.monotonic())

    def _handle_all(self) -> float:
        """Wait a moment for an event, then handle all that arrive until the next tick is due.

        Returns until when everything that has arrived is handled.
        """
        wait_s, until_s = _TICK_S, time.monotonic() + _TICK_S
        while True:
            now_s = time.monotonic()
            try:
                arrived_s, handle = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                break
            handle()
            wait_s = max(0.0, self._next_tick_s - time.monotonic())
            if time.monotonic() > until_s:
                now_s = arrived_s
                break
        self._relay.flush()
        return now_s

    def _handle(self, link: AgentLink, message: dict[str, Any], now: float) -> None:
        kind, host = message["type"], link.host
        if self._links.get(host) is not link:
            return
        if kind == "said":
            self._members.worker_message(message["worker"], message["message"], now)
        elif kind == "dying":
            self._members.worker_dying(message["worker"], now)
        elif kind == "exited":
            self._members.worker_exited(message["worker"], message["code"], now)
        elif kind == "put":
            self._relay.put(message["round"], message["key"], message["value"])
        elif kind == "beat":
            self._members.agent_heartbeat(host, {int(k): v for k, v in message["halted"].items()}, now, message["busy"])
        elif kind == "log":
            self._say(f"{host}: {message['text']}")
        elif kind == "ready":
            link.store, link.networks = message["store"], message["networks"]
            link.address, link.interface = message["address"], message["interface"]
            self._members.agent_ready(host, now)
        elif kind == "gone":
            self._members.agent_lost(host, message["why"], now)

    def _receive(self, item: tuple[AgentLink, dict[str, Any]]) -> None:
        """Receive a message in a thread of its link. Lines of ranks are shown here, without the deciding thread."""
        link, message = item
        if message["type"] != "line":
            return self._put(partial(self._handle, link, message, time.monotonic()))
        rank = self._ranks.get(message["worker"], 0)
        tag = f"[{rank}] " if rank or self._plan.tag else ""
        self._screen.show(tag + message["text"], message["err"])

    def _execute(self, commands: Iterable[job.Command]) -> None:
        commands, plan = list(commands), self._plan
        chosen = list(dict.fromkeys(c.host for c in commands if isinstance(c, job.SendMessage) and c.kind == "round"))
        fabric = shared_fabric([self._links[host].networks for host in chosen])
        away = next((host for host in chosen if host not in plan.local), "")
        for command in commands:
            if isinstance(command, job.SendMessage):
                self._send_to_worker(command, away, fabric)
            elif isinstance(command, job.Event):
                self._log.write(command.name, {**command.facts, **({"text": command.text} if command.text else {})})
                if command.text:
                    self._say(command.text)
            elif isinstance(command, job.StartWorker):
                self._ranks[command.worker] = command.place["rank"]
                facts = {"argv": [*plan.program], "environment": rank_environment(plan, command.host, command.place)}
                self._send(command.host, "start", worker=command.worker, **facts)
            elif isinstance(command, job.KillWorker):
                self._send(command.host, "kill", worker=command.worker, after_s=command.after_s)
            elif isinstance(command, job.OpenRound):
                self._relay.open(command.round, command.keys)
            elif isinstance(command, job.StartAgent):
                self._start_agent(command.host)
            elif isinstance(command, job.StopAgent):
                if (link := self._links.pop(command.host, None)) is not None:
                    link.close()
                    self._old = [*(old for old in self._old if not old.ended()), link]
            else:
                assert isinstance(command, job.End)
                self._code = command.code

    def _send_to_worker(self, command: job.SendMessage, away: str, fabric: str) -> None:
        facts = command.facts
        if command.kind == "round":
            self._ranks[command.worker] = facts["rank"]
            link = self._links[command.host]
            store = f"{link.store}/{facts['round']}"
            facts = {**facts, "store": store, "interface": self._interface(link, away, fabric)}
        self._send(command.host, "tell", worker=command.worker, what=command.kind, facts=facts)

    def _interface(self, link: AgentLink, away: str, fabric: str) -> str:
        """Return the interface by which ranks of this host reach those of the other hosts.

        `away`: one that is not this machine, "" if there is none; `fabric`: network of the fast interfaces of all of
        them, "" where there is none.
        """
        if not away:
            return "lo"
        if self._plan.job.interface or fabric:
            return self._plan.job.interface or link.networks[fabric]
        if link.host not in self._plan.local:
            return link.interface
        return interface_of(source_to(self._links[away].address))

    def _start_agent(self, host: str) -> None:
        argv, environment = agent_command(self._plan, host), starting_environment(self._plan, host)
        try:
            link = AgentLink(host, argv, environment, self._receive)
        except OSError as error:
            self._members.agent_lost(host, str(error), time.monotonic())
            return
        self._links[host] = link
        link.start()
        link.send("hello", **hello_message(self._plan, host))

    def _send(self, host: str, kind: str, **facts: Any) -> None:
        if (link := self._links.get(host)) is not None:
            link.send(kind, **facts)

    def _send_all(self, kind: str, **facts: Any) -> None:
        data = encode_message(kind, facts)
        for link in self._links.values():
            link.write(data)

    def _close(self) -> None:
        """Close all agents, and show the ranks' last lines."""
        links = [*self._old, *self._links.values()]
        for link in links:
            link.close()
        until_s = time.monotonic() + END_S
        for link in links:
            link.wait(max(0.0, until_s - time.monotonic()))
        self._log.close()
        self._screen.close()
