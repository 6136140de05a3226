"""Requests to the server: only what it supports reaches the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvdtrain.serve.request import Limits, RefusedError, read_request

LIMITS = Limits(tokens=50, input_bytes=1000, seconds=5, waiting=2)


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
        ({"prompt": ["a"]}, "prompt must be"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": "a", "max_tokens": 51}, "max_tokens must be an integer from 1 to 50, found 51"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "n": 2}, "does not support 'n'"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "does not support 'frequency_penalty'"),
        ({"prompt": "a", "generation_config": "{}"}, "does not support 'generation_config'"),
        ({"prompt": "a", "logprobs": 3}, "does not support 'logprobs'"),
        ({"prompt": "a", "model": "org/other"}, "no model 'org/other'"),
    ],
)
def test_what_is_refused(body: Any, message: str) -> None:
    with pytest.raises(RefusedError, match=message) as caught:
        _read(body)
    assert caught.value.status == (404 if "model" in message else 400)


@pytest.mark.parametrize(
    "messages", [[], "hi", [1], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
)
def test_messages_that_are_refused(messages: Any) -> None:
    with pytest.raises(RefusedError, match="message"):
        _read({"messages": messages}, is_chat=True)
