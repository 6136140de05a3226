"""Limits on connections to the server: their number, and how long each may take."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Time for the head of a request, from the connection, or from the answer before."""


class Connection(H11Protocol):
    """A connection that is closed if it sends no request, or does not take the answer.

    uvicorn's `limit_concurrency` is the most of them. Then a new one ends the one that has waited longest for a
    request. Where all have a request, uvicorn answers with status 503. The application has
    `timeout_graceful_shutdown` seconds for a request.
    """

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the connections and the time."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, self._time_over)
        if len(self.connections) >= (self.limit_concurrency or float("inf")):
            others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
            idle = sorted((each for each in others if each._is_idle()), key=lambda each: each._timer.when())
            for oldest in idle[:1]:
                oldest.timeout_keep_alive_handler()

    def on_response_complete(self) -> None:
        """Give the next request its time."""
        self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_S, self._time_over)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the limit."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _is_idle(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def _time_over(self) -> None:
        if self._is_idle():
            self.timeout_keep_alive_handler()
        else:
            self._timer = self.loop.call_later(
                (self.config.timeout_graceful_shutdown or 0) + HEAD_S, self.transport.abort
            )
