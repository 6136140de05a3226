"""Requests to the server, in this process: only what it supports reaches the model, within limits."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from hvdtrain.serve.request import Limits, read_request

LIMITS = Limits(tokens=50, input_bytes=1000, seconds=5, waiting=2, stop_bytes=9)


def _read(body: Any, is_chat: bool = False) -> dict[str, Any]:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(text, "mine", is_chat, LIMITS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a"}, {"max_tokens": 50}),
        ({"prompt": "a", "max_tokens": 3, "model": "mine", "user": "u", "n": 1}, {"max_tokens": 3}),
        ({"prompt": "a", "max_completion_tokens": 4, "max_tokens": None}, {"max_tokens": 4}),
        ({"prompt": "a", "stop": "x", "echo": False}, {"max_tokens": 50, "stop": ["x"]}),
        ({"prompt": "a", "temperature": 0, "stream": True}, {"max_tokens": 50, "temperature": 0, "stream": True}),
    ],
)
def test_what_reaches_the_model(body: Any, expected: dict[str, Any]) -> None:
    assert _read(body) == {"prompt": "a", **expected}


def test_parts_of_messages_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = _read({"messages": [{"role": "user", "content": parts, "name": "n"}]}, is_chat=True)
    assert found["messages"] == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        ([], "not a JSON object"),
        ({}, "prompt must be"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": "a", "max_tokens": 51}, "max_tokens must be an integer from 1 to 50, found 51"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": ["a" * 8, "\u00e9"]}, "stop must have at most 9 bytes in all, found 10"),
        ({"prompt": "a", "temperature": 5e-324}, "temperature must be 0 or at least 1e-06, found 5e-324"),
        ({"prompt": "a", "temperature": False}, "temperature must be a number"),
        ({"prompt": "a\ud800"}, "half of a surrogate pair"),
        ({"prompt": "a", "stop": "\udc00"}, "half of a surrogate pair"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "n": 2}, "does not support 'n'"),
        ({"prompt": "a", "generation_config": "{}"}, "does not support 'generation_config'"),
        ({"prompt": "a", "model": "org/other"}, "no model 'org/other'"),
    ],
)
def test_what_is_refused(body: Any, message: str) -> None:
    with pytest.raises(HTTPException, match=message) as caught:
        _read(body)
    assert caught.value.status_code == (404 if "model" in message else 400)


@pytest.mark.parametrize(
    "messages", [[], "hi", [1], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
)
def test_messages_that_are_refused(messages: Any) -> None:
    with pytest.raises(HTTPException, match="message"):
        _read({"messages": messages}, is_chat=True)


KEY = "key-of-the-tests"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}", "host": "localhost"}
PROMPT, STREAM = b'{"prompt": "a"}', b'{"prompt": "a", "stream": true}'
CONFIG = SimpleNamespace(max_position_embeddings=100)
MODEL = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: CONFIG))


class Server:
    """A service whose model is free when `free` is set, instead of one by transformers; `cut` cuts all connections."""

    def __init__(self, seconds: float = 600.0) -> None:
        from hvdtrain.serve import app as serve  # which takes seconds

        self.begun, self.free, self.cut = asyncio.Event(), asyncio.Event(), asyncio.Event()
        limits = Limits(tokens=9, input_bytes=1000, seconds=seconds, waiting=3, stop_bytes=9)
        served = serve.OneModel("mine", MODEL, lambda prompt: SimpleNamespace(input_ids=prompt))
        self.service = service = serve.Service(served, limits, KEY)
        service._handlers = dict.fromkeys(service._handlers, self)
        self.app = service.app(["localhost"])

    async def handle_request(self, asked: dict[str, Any], number: str) -> Any:
        """Answer as transformers does."""
        from starlette import responses

        self.begun.set()
        if asked.get("stream"):
            return responses.StreamingResponse(self._pieces())
        await self.free.wait()
        return responses.JSONResponse({"usage": {"prompt_tokens": 1, "completion_tokens": 2}})

    async def _pieces(self) -> AsyncIterator[str]:
        yield "data: first\n\n"
        await self.free.wait()
        yield "data: last\n\n"

    async def ask(
        self, body: bytes = PROMPT, path: str = "/v1/completions", *, cut: bool = False, **headers: str
    ) -> tuple[int, str]:
        """Return status and text; with `cut`, the connection is cut after the first piece, or within the request."""
        sent: list[dict[str, Any]] = []
        answered, received = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": cut and not body}]

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            if body or not cut:
                await (answered if cut else self.cut).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message.get("body"):
                answered.set()

        given = [(name.encode(), value.encode()) for name, value in {**HEADERS, **headers}.items()]
        scope = {"type": "http", "method": "POST" if body or cut else "GET", "path": path, "headers": given}
        await self.app({**scope, "query_string": b"", "asgi": {"spec_version": "2.3"}}, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()

    async def metric(self, name: str) -> float:
        """Return 0 for one that is not there."""
        lines = (await self.ask(b"", "/metrics"))[1].splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run it with asyncio, up to the end of all that it began."""

    async def whole(**given: Any) -> None:
        await test(**given)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(whole(**given))

    return pytest.mark.skipif(find_spec("openai") is None, reason="hvdtrain[serve] is not installed")(run)


@in_a_loop
async def test_too_many_requests_are_refused_and_the_others_answered() -> None:
    """One is answered and three wait, also where all come at once."""
    server = Server()
    asked = [asyncio.create_task(server.ask()) for _ in range(6)]
    assert [(await each)[0] for each in asked[4:]] == [429, 429]
    assert await server.metric("hvdtrain_requests_waiting") == 3
    server.free.set()
    assert [(await each)[0] for each in asked[:4]] == [200] * 4
    assert await server.metric("hvdtrain_requests_waiting") == 0
    assert await server.metric('hvdtrain_tokens_total{kind="completion"}') == 4 * 2


@in_a_loop
async def test_nobody_waits_longer_than_the_limit() -> None:
    """A stream ends with the error; who comes later than others never begins."""
    server = Server(seconds=0.05)
    first = asyncio.create_task(server.ask())
    await server.begun.wait()
    assert (await server.ask())[0] == 503
    server.free.set()
    assert (await first)[0] == 504
    server.free.clear()
    code, text = await server.ask(STREAM)
    assert code == 200 and '"code": 504' in text and "[DONE]" not in text


@in_a_loop
async def test_cut_connections_free_the_model() -> None:
    """One is cut within its request, one within its answer."""
    server, cut = Server(), 'hvdtrain_requests_total{code="499",path="/v1/completions"}'
    for number, body in enumerate((b"", STREAM), 1):
        await server.ask(body, cut=True)
        assert await server.metric(cut) == number
    server.free.set()
    code, text = await server.ask(STREAM)
    assert code == 200 and text.endswith("data: last\n\ndata: [DONE]\n\n")


@in_a_loop
async def test_cut_requests_wait_no_longer() -> None:
    server = Server()
    first, *others = (asyncio.create_task(server.ask()) for _ in range(4))
    while await server.metric("hvdtrain_requests_waiting") < 3:
        await asyncio.sleep(0)
    server.cut.set()
    assert [code for code, _ in await asyncio.wait_for(asyncio.gather(*others), 60)] == [499] * 3
    assert await server.metric("hvdtrain_requests_waiting") == 0
    server.cut.clear()
    server.free.set()
    assert (await first)[0] == (await server.ask())[0] == 200


HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
WAITS = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n".encode()
WAITS += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(PROMPT), PROMPT)


@pytest.mark.parametrize(
    ("head_s", "sent", "first", "last"),
    [
        (0.01, [HEAD], b"", None),
        (0.1, [WAITS], b"", None),
        (600, [HEAD, HEAD, HEAD, HEAD + b"\r\n"], b"", b"HTTP/1.1 200"),
        (600, [WAITS, WAITS, HEAD + b"\r\n"], None, b"HTTP/1.1 503"),
    ],
    ids=["head", "answer", "most", "busy"],
)
@in_a_loop
async def test_connections_that_end(
    head_s: float, sent: list[bytes], first: bytes | None, last: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most three are open; expected is the answer to the first and to the last, b"" without one."""
    import uvicorn

    from hvdtrain.serve import app

    monkeypatch.setattr(app, "HEAD_S", head_s)
    service = Server()
    config = uvicorn.Config(service.app, http=app.Connection, limit_concurrency=3, log_level="critical")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        opened = []
        for number, text in enumerate(sent, 1):
            opened.append(await asyncio.open_connection(*listening.getsockname()))
            opened[-1][1].write(text)
            while text == WAITS and len(sent) > 1 and len(server.server_state.tasks) < number:
                await asyncio.sleep(0)
        for (reader, _), expected in ((opened[0], first), (opened[-1], last)):
            if expected is not None:
                found = await asyncio.wait_for(reader.readline() if expected else reader.read(), 60)
                assert found[:12] == expected
        for _, writer in opened:
            writer.close()
        service.free.set()
        server.should_exit = True
        await serving


@in_a_loop
async def test_the_end_waits_for_what_is_generated() -> None:
    """A thread that returns from torch while the interpreter ends would abort the process."""
    server, busy, ended = Server(), threading.Event(), list[bool]()
    server.free.set()

    async def serve_one() -> None:
        async with server.app.router.lifespan_context(server.app):
            server.service._state.get_manager("mine").submit(busy.wait)
            await server.ask()
        ended.append(busy.is_set())

    whole = asyncio.create_task(serve_one())
    await server.begun.wait()
    await asyncio.wait([whole], timeout=0.05)
    busy.set()
    await whole
    assert ended == [True]


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (PROMPT, {"authorization": "Bearer another"}, 401),
        (PROMPT, {"content-type": "text/plain"}, 415),
        (PROMPT, {"host": "elsewhere.example"}, 400),
        (b'{"prompt": "' + b"a" * 1000 + b'"}', {}, 413),
        (b'{"prompt": "' + b"a" * 100 + b'"}', {}, 400),
        (b"{", {}, 400),
        (PROMPT, {"path": "/load_model"}, 404),
        (b"", {"path": "/openapi.json"}, 404),
    ],
    ids=["key", "type", "host", "size", "tokens", "json", "path", "page"],
)
@in_a_loop
async def test_wrong_requests_are_refused(body: bytes, headers: dict[str, str], code: int) -> None:
    server = Server()
    server.free.set()
    assert (await server.ask(body, **headers))[0] == code
    assert (await server.ask())[0] == 200
