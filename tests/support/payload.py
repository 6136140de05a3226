"""What the published attacks on Horovod's key-value servers send: a pickle that does something when it is read."""

from __future__ import annotations

import base64
import http.client
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launch import TIMEOUT_S


@dataclass(frozen=True)
class MakesFolder:
    """Unpickled, it makes a folder."""

    marker: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.marker,)


def encoded(value: Any) -> bytes:
    """As Horovod's codec writes values."""
    return base64.b64encode(pickle.dumps(value))


def request(method: str, port: int, path: str, body: bytes | None = None) -> int:
    """The status of an answer; 0 where the connection is closed without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body=body)
        return connection.getresponse().status
    except (ConnectionError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
