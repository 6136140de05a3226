"""What a request to the server may contain."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

_IGNORED = ("model", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier")
_SETTINGS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stream")
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("echo", "logprobs"), False),
    **{"tools": [], "logit_bias": {}, "response_format": {"type": "text"}},
}
"""Parameters of OpenAI's API that the server lacks, with the value that changes nothing."""
_MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Limits:
    """Limits of each request."""

    tokens: int  # that a continuation may have
    input_bytes: int  # that a request may have
    seconds: float  # from its arrival to the end of its answer
    waiting: int  # requests that may wait for the model at once
    stop_bytes: int  # that the texts of `stop` may have in all


def most_of_stop(vocabulary: int) -> int:
    """Return how many bytes `stop` may have: transformers compares each with each token first, for about a microsecond.

    The square of this number is what it compares at each token of the answer.
    """
    return max(32, min(256, 4_000_000 // vocabulary))


def read_request(text: bytes, name: str, is_chat: bool, limits: Limits) -> dict[str, Any]:
    """Return a request with only what transformers' server supports; `name` is the model's.

    Errors: HTTPException: it is no JSON object, or a value is wrong or not supported.
    """
    try:
        body = json.loads(text)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HTTPException(400, "a text has half of a surrogate pair; expected whole characters") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the request is not a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    content = "messages" if is_chat else "prompt"
    if given.get("model", name) != name:
        raise HTTPException(404, f"there is no model {str(given['model'])[:100]!r}; expected {name!r}")
    for key, value in given.items():
        if key not in (content, *_IGNORED, *_SETTINGS) and (key not in _NEUTRAL or value != _NEUTRAL[key]):
            raise HTTPException(400, f"this server does not support {key[:100]!r}")
    found: dict[str, Any] = {key: given[key] for key in _SETTINGS if key in given}
    tokens = found.pop("max_completion_tokens", found.get("max_tokens", limits.tokens))
    found["max_tokens"] = _within("max_tokens", tokens, 1, limits.tokens, int)
    if 0 < _within("temperature", found.get("temperature", 1), 0, 2, (int, float)) < 1e-6:
        raise HTTPException(400, f"temperature must be 0 or at least 1e-06, found {found['temperature']}")
    _within("top_p", found.get("top_p", 1), 1e-6, 1, (int, float))
    _within("seed", found.get("seed", 0), 0, _MOST_SEED, int)
    if not isinstance(found.get("stream", False), bool):
        raise HTTPException(400, "stream must be true or false")
    found["stop"] = _stops(found.get("stop", []), limits.stop_bytes)
    found[content] = (_messages if is_chat else _prompt)(given.get(content))
    return {key: value for key, value in found.items() if value != []}


def _within(name: str, value: Any, least: float, most: float, kinds: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "an integer" if kinds is int else "a number"
        raise HTTPException(400, f"{name} must be {kind} from {least} to {most}, found {str(value)[:100]}")
    return value


def _stops(value: Any, most: int) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > 4 or not all(isinstance(text, str) and text for text in found):
        raise HTTPException(400, "stop must be a text, or a list of four texts at most; none may be empty")
    if (size := sum(len(text.encode()) for text in found)) > most:
        raise HTTPException(400, f"stop must have at most {most} bytes in all, found {size}")
    return found


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise HTTPException(400, "prompt must be a text of at least one character")
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise HTTPException(400, "messages must be a list of at least one message")
    return [{"role": _text(message, "role"), "content": _text(message, "content")} for message in value]


def _text(message: Any, key: str) -> str:
    value = message.get(key) if isinstance(message, dict) else None
    if isinstance(value, list):  # of parts
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        value = None if None in parts else "".join(map(str, parts))
    if not isinstance(value, str):
        raise HTTPException(400, f"each message needs a {key}, which must be text")
    return value
