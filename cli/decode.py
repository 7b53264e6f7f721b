"""`tandem decode`: one decode worker process, the same as `python -m decode_worker`."""

from __future__ import annotations

import argparse

from cli.command import Subparsers, add_command
from cli.upward import import_upward
from tandem.config import DecodeConfig, add_arguments, load


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "decode",
        run,
        "one decode worker process",
        "Owns a paged KV pool and decodes in it by continuous batching. Registers with every --router. "
        "Prints `ready HOST:PORT` on stdout once it listens.",
    )
    add_arguments(parser, DecodeConfig)


def run(namespace: argparse.Namespace) -> int:
    """Runs the process until SIGTERM; returns its exit code. Raises ConfigError."""
    config = load(DecodeConfig, namespace)
    return int(import_upward("decode_worker.app").run(config))
