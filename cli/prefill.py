"""`tandem prefill`: one prefill worker process, the same as `python -m prefill_worker`."""

from __future__ import annotations

import argparse

from cli.command import Subparsers, add_command
from cli.upward import import_upward
from tandem.config import PrefillConfig, add_arguments, load


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "prefill",
        run,
        "one prefill worker process",
        "Computes prompts and pushes their KV blocks to decode workers. Registers with every --router. "
        "Prints `ready HOST:PORT` on stdout once it listens.",
    )
    add_arguments(parser, PrefillConfig)


def run(namespace: argparse.Namespace) -> int:
    """Runs the process until SIGTERM; returns its exit code. Raises ConfigError."""
    config = load(PrefillConfig, namespace)
    return int(import_upward("prefill_worker.app").run(config))
