"""`tandem router`, `prefill`, `decode` and `worker`: one process each, as `python -m router` and its like."""

from __future__ import annotations

import argparse
import importlib
from functools import partial

from cli.command import Subparsers, add_command
from shell.config import DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, add_arguments, load
from tandem.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Declares the commands."""
    for name, config, package, details in (
        (
            *("router", RouterConfig, "router"),
            "Accepts requests, places them on the workers that register with it, streams their tokens.",
        ),
        (
            *("prefill", PrefillConfig, "prefill_worker"),
            "Computes prompts and pushes their KV blocks to decode workers. Registers with every --router.",
        ),
        (
            *("decode", DecodeConfig, "decode_worker"),
            "Owns a paged KV pool and decodes in it by continuous batching. Registers with every --router.",
        ),
        (
            *("worker", ElasticConfig, "decode_worker"),
            "A decode worker that also computes prompts, for itself and for others, in chunks beside its decodes. "
            "Registers with every --router.",
        ),
    ):
        description = f"{details} Prints `ready HOST:PORT` on stdout once it listens."
        add_arguments(add_command(subparsers, name, partial(_run, package, config), description), config)


def _run(package: str, config: type[RouterConfig | PrefillConfig | DecodeConfig], namespace: argparse.Namespace) -> int:
    """Runs until SIGTERM; returns the exit code. Raises ConfigError."""
    options = load(config, namespace)
    try:
        app = importlib.import_module(f"{package}.app")  # here: a router's machine has no torch, and needs none
    except ModuleNotFoundError as error:
        raise ConfigError("a worker", f"needs {error.name}; install the extra `worker`") from error
    return int(app.run(options))
