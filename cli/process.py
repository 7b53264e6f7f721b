"""`tandem router`, `tandem prefill`, `tandem decode`: one process each, the same as `python -m router` and its like."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from cli.command import Subparsers, add_command
from tandem.config import DecodeConfig, PrefillConfig, RouterConfig, add_arguments, load
from tandem.errors import ConfigError

_READY = "Prints `ready HOST:PORT` on stdout once it listens."


def add_parsers(subparsers: Subparsers) -> None:
    """Declares the three commands."""
    for name, run, config, what, details in (
        (
            *("router", _run_router, RouterConfig, "router"),
            "Accepts requests, places them on the workers that register with it, streams their tokens.",
        ),
        (
            *("prefill", _run_prefill, PrefillConfig, "prefill worker"),
            "Computes prompts and pushes their KV blocks to decode workers. Registers with every --router.",
        ),
        (
            *("decode", _run_decode, DecodeConfig, "decode worker"),
            "Owns a paged KV pool and decodes in it by continuous batching. Registers with every --router.",
        ),
    ):
        add_arguments(add_command(subparsers, name, run, f"one {what} process", f"{details} {_READY}"), config)


def _run_router(namespace: argparse.Namespace) -> int:
    """Runs until SIGTERM; returns the exit code. Raises ConfigError, like the two below."""
    config = load(RouterConfig, namespace)
    from router import app

    return app.run(config)


def _run_prefill(namespace: argparse.Namespace) -> int:
    config = load(PrefillConfig, namespace)
    with _worker_libraries():
        from prefill_worker import app
    return app.run(config)


def _run_decode(namespace: argparse.Namespace) -> int:
    config = load(DecodeConfig, namespace)
    with _worker_libraries():
        from decode_worker import app
    return app.run(config)


@contextmanager
def _worker_libraries() -> Iterator[None]:
    """Imports of a worker, inside its command: a router's machine has no torch, and needs none."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError("a worker", f"needs {error.name}; install tandem-server[worker]") from error
