"""The web application. transformers' handlers of OpenAI's API generate; here are limits, checks and metrics.

`transformers serve` itself is not used: it loads any model that a request names, from the hub too, and has no limits.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState
from uvicorn.protocols.http.h11_impl import H11Protocol

from hvdtrain.serve.request import Limits, read_request

CLIENT_CLOSED = 499
"""Status in the metrics of a request if its connection was cut. Source: nginx."""
HEAD_S = 10.0
"""Time for the head of a request, from the connection, or from the answer before."""


class OneModel:
    """The model of the server, in the form in which transformers' handlers ask for it."""

    get_model_modality = staticmethod(ModelManager.get_model_modality)

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.force_model = name
        self.model = model
        self.tokenizer = tokenizer

    def process_model_name(self, name: str) -> str:
        """Return it."""
        return name

    def load_model_and_processor(self, name: str, gguf_file: str | None = None) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        return self.model, self.tokenizer


class Service:
    """The routes: completions, chat completions, models, health and metrics. A `key` that is not "" is required.

    Requests wait for the model in a queue; it answers one after the other.
    """

    def __init__(self, served: OneModel, limits: Limits, key: str) -> None:
        self._served, self._limits, self._key = served, limits, key
        self._state = GenerationState(continuous_batching=False)
        self._handlers = {kind: kind(served, self._state) for kind in (CompletionHandler, ChatCompletionHandler)}
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._registry = registry = CollectorRegistry()
        labels = ("path", "code")
        self._requests = Counter("hvdtrain_requests", "Requests", labels, registry=registry)
        self._seconds = Histogram("hvdtrain_request_seconds", "Time to the end of the answer", registry=registry)
        self._tokens = Counter("hvdtrain_tokens", "Tokens of answered requests", ("kind",), registry=registry)
        waiting = Gauge("hvdtrain_requests_waiting", "Requests that wait for the model", registry=registry)
        waiting.set_function(lambda: self._waiting)

    def app(self, hosts: list[str]) -> Starlette:
        """Return the application; requests must name one of `hosts`."""
        completion, chat = (self._answer_with(kind) for kind in (CompletionHandler, ChatCompletionHandler))
        routes = [
            Route("/v1/completions", self._counted(completion), methods=["POST"]),
            Route("/v1/chat/completions", self._counted(chat), methods=["POST"]),
            Route("/v1/models", self._counted(self._models)),
            Route("/health", lambda request: JSONResponse({"status": "ok", "waiting": self._waiting})),
            Route("/metrics", lambda _: Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)),
        ]
        hosts_only = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        failed = {HTTPException: lambda request, error: _error(error.status_code, str(error.detail))}
        return Starlette(routes=routes, middleware=[hosts_only], exception_handlers=failed, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Wait at the end for what is generated: its thread would abort the process that ends."""
        yield
        await asyncio.gather(*self._tasks)

    async def _models(self, request: Request) -> Response:
        entry = {"id": self._served.force_model, "object": "model", "created": 0, "owned_by": "hvdtrain"}
        return JSONResponse({"object": "list", "data": [entry]})

    def _counted(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return `answer` with the key checked, and errors as responses; it is counted, also when a stream ends."""

        async def counted(request: Request) -> Response:
            began = time.monotonic()

            def count(code: int) -> None:
                self._requests.labels(request.url.path, code).inc()
                self._seconds.observe(time.monotonic() - began)

            try:
                given = request.headers.get("authorization", "")
                if self._key and not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
                    raise HTTPException(401, "the request needs the server's key: Authorization: Bearer KEY")
                response = await answer(request)
            except HTTPException as error:
                response = _error(error.status_code, str(error.detail))
            except ClientDisconnect:
                response = _error(CLIENT_CLOSED, "the connection was cut")
            except Exception as error:
                traceback.print_exc()
                response = _error(500, f"generation failed: {type(error).__name__}")
            if isinstance(response, StreamingResponse):
                response.body_iterator = self._stream(response.body_iterator, began, count)
            else:
                count(response.status_code)
            return response

        return counted

    def _answer_with(self, kind: Any) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            began = time.monotonic()
            body = await self._body(request)
            asked = read_request(body, self._served.force_model, kind is ChatCompletionHandler, self._limits)
            asked["max_tokens"] = min(asked["max_tokens"], self._room(asked))
            await self._take_turn(request, began)
            generates = self._state.get_manager(self._served.force_model)
            try:
                response: Response = await self._handlers[kind].handle_request(asked, str(uuid.uuid4()))
            finally:
                # The model is free when what it was given before is done: a stream continues until then.
                done = asyncio.create_task(self._end_turn(generates.async_submit(lambda: None)))
                self._tasks.add(done)
                done.add_done_callback(self._tasks.discard)
            if not isinstance(response, StreamingResponse):
                self._add_tokens(json.loads(bytes(response.body)))
                if self._left(began) < 0:
                    raise HTTPException(504, f"the answer takes longer than {self._limits.seconds:g} s")
            return response

        return answer

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "the content type must be application/json")

        async def read() -> bytes:
            body = bytearray()
            async for piece in request.stream():
                body += piece
                if len(body) > self._limits.input_bytes:
                    raise HTTPException(413, f"the request has more than {self._limits.input_bytes} bytes")
            return bytes(body)

        try:
            return await asyncio.wait_for(read(), self._limits.seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"the request did not arrive within {self._limits.seconds:g} s") from None

    def _room(self, asked: dict[str, Any]) -> int:
        """Return how many tokens the model can add. Errors: HTTPException: none, or there is no chat template."""
        tokenizer, config = self._served.tokenizer, self._served.model.config.get_text_config()
        if "messages" in asked:
            if not tokenizer.chat_template:
                raise HTTPException(400, "the model has no chat template: use /v1/completions")
            try:
                ids = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=True)
            except TemplateError as error:
                raise HTTPException(400, f"the chat template refuses the messages: {error}") from None
            used = len(ids["input_ids"])
        else:
            used = len(tokenizer(asked["prompt"]).input_ids)
        most = getattr(config, "max_position_embeddings", None) or used + self._limits.tokens
        if not 0 < used < most:
            raise HTTPException(400, f"the input has {used} tokens; expected 1 to {most - 1}")
        return int(most - used)

    async def _take_turn(self, request: Request, began: float) -> None:
        free = not self._turn.locked()  # then one of those that wait is about to take the turn
        if self._waiting >= self._limits.waiting + free:
            raise HTTPException(429, f"{self._waiting} requests wait for the model already")
        self._waiting += 1
        turn, cut = asyncio.create_task(self._turn.acquire()), asyncio.create_task(_wait_for_cut(request))
        try:
            await asyncio.wait((turn, cut), timeout=self._left(began), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting -= 1
            turn.cancel()
            cut.cancel()
        await asyncio.wait((turn, cut))
        if turn.cancelled():
            busy = HTTPException(503, f"the model was busy for {self._limits.seconds:g} s")
            raise busy if cut.cancelled() else ClientDisconnect

    def _left(self, began: float) -> float:
        return began + self._limits.seconds - time.monotonic()

    async def _end_turn(self, idle: Awaitable[None]) -> None:
        await idle
        self._turn.release()

    async def _stream(self, pieces: Any, began: float, count: Callable[[int], None]) -> AsyncIterator[str]:
        """Pass on a stream, and end it as OpenAI does; when time is over, with an error."""
        code = CLIENT_CLOSED
        try:
            while piece := await asyncio.wait_for(anext(pieces, ""), self._left(began)):
                for line in piece.split("\n\n"):
                    if '"usage"' in line:
                        self._add_tokens(json.loads(line.removeprefix("data: ")))
                yield piece
            code = 200
            yield "data: [DONE]\n\n"
        except asyncio.TimeoutError:
            code = 504
            problem = _problem(504, f"the answer takes longer than {self._limits.seconds:g} s")
            yield f"data: {json.dumps(problem)}\n\n"
        finally:
            await pieces.aclose()
            count(code)

    def _add_tokens(self, answer: dict[str, Any]) -> None:
        for kind in ("prompt", "completion"):
            self._tokens.labels(kind).inc(answer["usage"][f"{kind}_tokens"])


async def _wait_for_cut(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _problem(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status, "param": None}}


def _error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(_problem(status, message), status, headers)


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
            patience_s = (self.config.timeout_graceful_shutdown or 0) + HEAD_S
            self._timer = self.loop.call_later(patience_s, self.transport.abort)
