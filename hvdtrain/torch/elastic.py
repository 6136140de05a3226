"""A drop-in for `horovod.torch.elastic`; `run` also supports our own driver: ``hvdtrain launch --elastic``."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.comm import horovod
from hvdtrain.comm.horovod import HorovodInternalError, hvd
from hvdtrain.comm.rounds import CHANGED, FAILED, STARTED, DriverRounds
from hvdtrain.runtime.driver_client import DriverClient, Heartbeat, JobFailed, NoPlace, connect_to_driver
from hvdtrain.runtime.environment import RankInfo, change_variables

__all__ = hvd.elastic.__all__


def __getattr__(name: str) -> Any:
    """Return Horovod's attribute for every name that is not ours, except dunder names."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(hvd.elastic, name)


class ElasticProgram:
    """A rank that runs the user's program under our own elastic driver."""

    def __init__(self, client: DriverClient, info: RankInfo) -> None:
        self._client = client
        self._rounds = DriverRounds(client, info)
        self._steps = -1
        self._why, self._text = STARTED, ""
        client.on_change = lambda: horovod.notify_host_update(client.round)
        register_optimizer_step_post_hook(self._count)
        atexit.register(self._leave)

    def enter(self) -> None:
        """Join the ranks of the next round. Collective: yes. Errors: SystemExit: the job needs this process no more."""
        try:
            self._rounds.enter(self._why, self._text, self._steps)
        except NoPlace as error:
            raise SystemExit(int(isinstance(error, JobFailed))) from None
        # Horovod would look for its own driver there, and open a port to everybody for its messages.
        change_variables({"HOROVOD_GLOO_RENDEZVOUS_ADDR": None})
        self._client.heartbeat = Heartbeat(step=lambda: self._steps)
        self._why, self._text = FAILED, ""

    def train(self, function: Callable[..., Any], state: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a training function, and remember why it ended."""
        if self._client.is_changed():  # before there was a state to notify
            horovod.notify_host_update(self._client.round)
        try:
            return function(state, *arguments, **keywords)
        except HorovodInternalError as error:
            self._text = str(error)
            raise
        except horovod.HostsUpdatedInterrupt:
            self._why = CHANGED
            raise

    def _count(self, *_: Any) -> None:
        self._steps = max(self._steps, 0) + 1

    def _leave(self) -> None:
        if not hasattr(sys, "last_value"):  # the error that ended the program
            self._client.report_leaving("finished")


_program: ElasticProgram | None = None


def elastic_program(info: RankInfo) -> ElasticProgram | None:
    """Return this process's rank under our own elastic driver; None in other jobs."""
    global _program
    if _program is None and (client := connect_to_driver(info.variables)) is not None:
        _program = ElasticProgram(client, info)
    return _program


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function continue when ranks leave or join: `hvd.elastic.run`."""

    @functools.wraps(function)
    def train(state: Any, *arguments: Any, **keywords: Any) -> Any:
        if _program is not None:
            return _program.train(function, state, *arguments, **keywords)
        return function(state, *arguments, **keywords)

    wrapped: Callable[..., Any] = hvd.elastic.run_fn(train, _reset)
    return wrapped


def _reset() -> None:
    if _program is not None:
        return _program.enter()
    hvd.shutdown()
    hvd.init()
    horovod.begin_session()
