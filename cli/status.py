"""`tandem status`: what one router knows of its cluster, as tables, JSON, or live."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from cli.command import Subparsers, add_command
from cli.status_view import view
from cli.terminal import open_console, print_whole
from cli.watch import watch
from tandem.client import Client
from tandem.config import ClientConfig, add_arguments, load
from tandem.errors import ConfigError
from tandem.option_values import seconds

_WATCH_S = "1"


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "status",
        run,
        "workers, roles, pools, queues and transfers of a cluster",
        "As the asked router knows them from heartbeats.",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print JSON")
    shape.add_argument(
        "--watch",
        nargs="?",
        const=_WATCH_S,
        metavar="SECONDS",
        help=f"show it live, renewed every so many seconds [{_WATCH_S}], until ctrl-C or SIGTERM",
    )
    add_arguments(parser, ClientConfig)


def run(namespace: argparse.Namespace) -> int:
    """Prints the status, once or until ctrl-C. Raises TandemError."""
    config = load(ClientConfig, namespace)
    interval_s = None if namespace.watch is None else _interval_s(namespace.watch)
    with Client(config.target, security=config.security) as client:
        if interval_s is not None:
            return watch(client, config.target, interval_s, config.timeout_s)
        status = client.status(timeout_s=config.timeout_s)
    if namespace.json:
        print(json.dumps(asdict(status), ensure_ascii=False))
    else:
        print_whole(open_console(), *view(status))
    return 0


def _interval_s(text: str) -> float:
    try:
        return float(seconds(0.1, 3600)(text))
    except ValueError as error:
        raise ConfigError("--watch", f"{error} (got {text!r})") from error
