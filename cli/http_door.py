"""The HTTP door of `tandem serve --http`: OpenAI's and Anthropic's APIs, by the gateway `smg` in front of the router.

`python -m cli.http_door --listen HOST:PORT --router HOST:PORT` runs it, prints `ready HOST:PORT` once it serves the
router's model, and ends by SIGTERM when running answers are done. smg calls the router's face for vLLM's engine
protocol. It brings no token and speaks no TLS to a router: where that asks for them, smg calls `cli.pass_through`. Of
its own callers smg asks the token that this process brings, as their API key, and it shows them this process's
certificate; it cannot ask for theirs.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence

from cli.http_call import HttpCaller
from cli.pass_through import start_pass_through
from shell.command_line import EXIT_BAD_CONFIG, CommandLine
from shell.config import HttpDoorConfig, ServeConfig, add_arguments, load
from tandem.errors import ConfigError
from tandem.security.credentials import Outgoing
from tandem.security.exposure import is_loopback

_POLL_S = 0.1
_LOOK_S = "1"
"""How often smg looks whether the router is there, and so the longest that it refuses requests after its return."""
_ASK_TIMEOUT_S = 5.0
_CALLED = frozenset({"vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"})
"""The services that smg calls."""
_INSTALL = "needs smg; install the extra `http`"


def check_http(config: ServeConfig) -> None:
    """Raises ConfigError if `--http` cannot work with the other options."""
    if config.http is None:
        return
    security = config.router.security
    if importlib.util.find_spec("smg") is None:
        raise ConfigError("--http", _INSTALL)
    asks = security.tls_cert is not None and security.token_file is not None
    if not asks and not is_loopback(config.http) and not security.insecure:
        raise ConfigError(
            "--http",
            f"other machines can reach {config.http}: give --tls-cert, --tls-key, --tls-ca and --token-file (callers' "
            "certificates are not asked for there), or else --insecure",
        )


def main() -> None:
    """Runs until SIGTERM."""
    parser = CommandLine(prog="python -m cli.http_door", description=__doc__)
    add_arguments(parser, HttpDoorConfig)
    try:
        config = load(HttpDoorConfig, parser.parse_args())
        if importlib.util.find_spec("smg") is None:
            raise ConfigError("--http", _INSTALL)
        outgoing = Outgoing.of_client(config.security, config.router)
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    host, _, port = config.listen.rpartition(":")
    address = f"{host}:{int(port) or _free_port(host)}"
    stdout = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the gateway prints is log
    caller = HttpCaller(address, outgoing)
    threading.Thread(target=_tell_when_ready, args=(caller, address, stdout), daemon=True).start()
    router = config.router
    if outgoing.tls is not None or outgoing.tokens is not None:
        router = start_pass_through(router, _CALLED, outgoing, config.max_receive_bytes)
    _run_gateway(address, router, config, outgoing)


def _run_gateway(address: str, router: str, config: HttpDoorConfig, outgoing: Outgoing) -> None:
    """In this process: signals reach it, and its arguments, the key among them, are in no list of processes."""
    from smg import launch_router
    from smg.cli import main as smg

    launch_router.print_banner = lambda *_: None  # a drawing, which is no line of a log
    host, _, port = address.rpartition(":")
    files = config.security
    tls = () if files.tls_cert is None else ("--tls-cert-path", files.tls_cert, "--tls-key-path", files.tls_key)
    key = () if outgoing.tokens is None else ("--api-key", outgoing.tokens.bearer().removeprefix("Bearer "))
    # Whoever may generate may not add servers, nor remove the router; nobody may, as nobody knows this key.
    control = ("--control-plane-api-keys", f"tandem:tandem:admin:{secrets.token_urlsafe(32)}")
    sys.argv = [
        *("smg", "launch", "--host", host.strip("[]"), "--port", port, *_words(config.gateway), *control),
        *("--shutdown-grace-period-secs", str(math.ceil(config.drain_grace_s))),
        *("--worker-urls", f"grpc://{router}", "--backend", "vllm", "--history-backend", "none"),
        # One router has no other to spare: without it, nothing is gained by refusing until 60 s have passed.
        *("--disable-circuit-breaker", "--load-monitor-interval", _LOOK_S),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port("127.0.0.1")), "--log-level", "warn"),
        *(word for word in (*tls, *key) if word is not None),
    ]
    smg()


def _words(options: Sequence[str]) -> list[str]:
    """`NAME=VALUE` as smg's command line has it; values of one name stand together."""
    values: dict[str, list[str]] = {}
    for name, _, value in (each.partition("=") for each in options):
        values.setdefault(name, []).extend([value] if value else [])
    return [word for name, given in values.items() for word in (f"--{name}", *given)]


def _tell_when_ready(caller: HttpCaller, address: str, stdout: int) -> None:
    while not _has_model(caller):
        time.sleep(_POLL_S)
    os.write(stdout, f"ready {address}\n".encode())


def _has_model(caller: HttpCaller) -> bool:
    """Whether the gateway knows a model and its tokenizer, which comes later: until then it refuses requests."""
    try:
        model = caller.model(_ASK_TIMEOUT_S)
        if model is None:
            return False
        return caller.answer("/v1/tokenize", _ASK_TIMEOUT_S, {"model": model, "prompt": "a"})[0] == 200
    except OSError:
        return False


def _free_port(host: str) -> int:
    with socket.create_server((host.strip("[]"), 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
