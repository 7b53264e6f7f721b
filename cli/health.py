"""`tandem health`: asks one process whether it can serve; for probes of servers that speak TLS."""

from __future__ import annotations

import argparse

from cli.command import Subparsers, add_command
from shell.command_line import EXIT_FAILED, EXIT_OK
from shell.config import ClientConfig, add_arguments, load
from tandem.client import Client

LONGEST_S = 5.0
"""A probe asks again soon."""


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "health",
        run,
        "Asks grpc.health.v1 of a router or a worker: 0 = SERVING, 1 = not, or not reachable. Needs no token. "
        f"Waits {LONGEST_S:g} s at most.",
    )
    parser.add_argument("--service", default="", metavar="NAME", help="one service [the whole process]")
    add_arguments(parser, ClientConfig)


def run(namespace: argparse.Namespace) -> int:
    """Prints SERVING or NOT_SERVING. Raises TandemError if there is no answer."""
    config = load(ClientConfig, namespace)
    with Client(config.target, security=config.security) as client:
        serving = client.serving(namespace.service, timeout_s=min(config.timeout_s, LONGEST_S))
    print("SERVING" if serving else "NOT_SERVING")
    return EXIT_OK if serving else EXIT_FAILED
