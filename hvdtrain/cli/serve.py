"""``hvdtrain serve``: answer requests of OpenAI's API with a trained language model."""

from __future__ import annotations

import argparse
import ipaddress
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.parser import MODEL_HELP, Parser, local, positive
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.environment import environ

if TYPE_CHECKING:
    from hvdtrain.task.saved_model import SavedModel

_MORE_CONNECTIONS = 64
"""Than requests may wait: for the one that is answered, for /metrics, and between requests."""
_DESCRIPTION = """\
Serve the model of a run's newest checkpoint, of a checkpoint, or of a folder of
transformers by OpenAI's API: /v1/completions, /v1/chat/completions and
/v1/models; also /health, and /metrics for Prometheus. Ctrl-C or SIGTERM ends it
after the requests under way."""
_EPILOG = """\
examples:
  hvdtrain serve runs/NAME
  curl http://127.0.0.1:8000/v1/completions \\
       -H 'content-type: application/json' -d '{"prompt": "def "}'
  hvdtrain serve my-model --backend vllm --host 0.0.0.0 --key_file key.txt
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain serve", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("path", metavar="RUN", help=MODEL_HELP)
    backend = "what generates: transformers, one request at a time, or vllm if it is installed (default: transformers)"
    made.add_argument("--backend", choices=("transformers", "vllm"), default="transformers", help=backend)
    made.add_argument("--name", help="of the model in requests (default: name of the folder)")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    made.add_argument("--port", type=_port, default=8000, help="to listen on; 0: any free one (default: 8000)")
    key = "file with the key that requests must have; required if other machines can reach --host"
    made.add_argument("--key_file", type=local, metavar="FILE", help=key)
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    made.add_argument("--tokens", type=positive, default=1024, help="most of a continuation (default: 1024)")
    made.add_argument("--kib", type=positive, default=256, help="most of a request, in KiB (default: 256)")
    made.add_argument("--seconds", type=positive, default=120, help="most for a request (default: 120)")
    made.add_argument("--waiting", type=positive, default=32, help="requests that may wait for the model (default: 32)")
    return made


def main(argv: list[str]) -> int:
    """Serve until a signal; return 0. Errors: ConfigError: port, key or model are wrong; those of the model."""
    options = parser().parse_args(argv)
    key = _key(options)

    from hvdtrain.task.saved_model import find_model

    source = find_model(options.path, "RUN")
    name = options.name or Path(options.path).resolve().name
    if options.backend == "vllm":
        return _start_vllm(source, name, key, options)
    listening = _listen(options.host, options.port)
    return _serve(source, name, key, listening, options)


def _serve(source: SavedModel, name: str, key: str, listening: socket.socket, options: Any) -> int:
    from hvdtrain.task.base import import_library
    from hvdtrain.task.causal_lm import load_model
    from hvdtrain.task.encode import load_tokenizer
    from hvdtrain.training.start.device import pick_device

    transformers = import_library("transformers", "hvdtrain serve", "serve")
    for library in ("fastapi", "openai", "prometheus_client", "uvicorn"):
        import_library(library, "hvdtrain serve", "serve")
    import uvicorn

    from hvdtrain.serve.app import Connection, OneModel, Service
    from hvdtrain.serve.request import Limits, most_of_stop

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it reports each request as a warning
    tokenizer = load_tokenizer(source.folder)
    model: Any = load_model(source).eval().to(pick_device(options.device, 0, 1))
    settings = model.generation_config
    settings.do_sample, settings.max_time = True, float(options.seconds)
    settings.eos_token_id = tokenizer.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
    settings.pad_token_id = tokenizer.pad_token_id if settings.pad_token_id is None else settings.pad_token_id
    stop = most_of_stop(len(tokenizer))
    limits = Limits(options.tokens, options.kib << 10, options.seconds, options.waiting, stop)
    host, port = listening.getsockname()[:2]
    hosts = ["localhost", "127.0.0.1", "[::1]"] if _is_loopback(host) else ["*"]
    app = Service(OneModel(name, model, tokenizer), limits, key).app(hosts)
    limits_of_server = {
        "limit_concurrency": options.waiting + _MORE_CONNECTIONS,
        "timeout_graceful_shutdown": options.seconds,
    }
    config = uvicorn.Config(
        app, http=Connection, ws="none", log_level="warning", server_header=False, **limits_of_server
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn handles them, then passes them on to these
        signal.signal(number, lambda *_: None)
    place = f"[{host}]" if ":" in host else host
    print(f"{source.folder} is served at http://{place}:{port}/v1 as {name!r}; Ctrl-C ends it", flush=True)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _start_vllm(source: SavedModel, name: str, key: str, options: Any) -> int:
    """Become vLLM's server. It reads the folder itself, and has queue, limits and metrics of its own."""
    if source.has_adapters:
        raise ConfigError(
            f"{source.folder} has only adapters of a model, and vLLM needs all weights",
            next_step=f"hvdtrain export {options.path} my-model, then hvdtrain serve my-model --backend vllm",
        )
    source.config()
    if (program := shutil.which("vllm")) is None:
        raise ConfigError("vllm is not installed", next_step="pip install vllm, or leave out --backend")
    argv = [program, "serve", str(source.folder), "--served-model-name", name]
    argv += ["--host", options.host, "--port", str(options.port)]
    variables = {**environ(), **({"VLLM_API_KEY": key} if key else {})}
    sys.stdout.flush()
    os.execve(program, argv, variables)  # noqa: S606


def _key(options: Any) -> str:
    if options.key_file is None:
        if _is_loopback(options.host):
            return ""
        raise ConfigError(
            f"anybody who reaches {options.host} could use the model",
            expected="--key_file FILE, so that requests need a key; or --host 127.0.0.1",
            next_step="(umask 077; python -c 'import secrets; print(secrets.token_urlsafe())' > key.txt)",
        )
    try:
        key: str = options.key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key cannot be read: {error}") from error
    if len(key) < 16 or not key.isprintable() or " " in key or not key.isascii():
        raise ConfigError(
            f"{options.key_file} has no usable key",
            expected="one line of at least 16 ASCII characters without spaces",
            found=f"{len(key)} characters",
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        next_step = "choose another port: --port 0 takes a free one"
        raise ConfigError(f"{host}:{port} cannot be listened on", found=str(error), next_step=next_step) from error


def _port(text: str) -> int:
    if not 0 <= (value := int(text)) < 1 << 16:
        raise argparse.ArgumentTypeError("expected 0 to 65535")
    return value
