"""`tandem router`: one router process, the same as `python -m router`."""

from __future__ import annotations

import argparse

from cli.command import Subparsers, add_command
from cli.upward import import_upward
from tandem.config import RouterConfig, add_arguments, load


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "router",
        run,
        "one router process",
        "Accepts requests, places them on the workers that register with it, streams their tokens. "
        "Prints `ready HOST:PORT` on stdout once it listens.",
    )
    add_arguments(parser, RouterConfig)


def run(namespace: argparse.Namespace) -> int:
    """Runs the process until SIGTERM; returns its exit code. Raises ConfigError."""
    config = load(RouterConfig, namespace)
    return int(import_upward("router.app").run(config))
