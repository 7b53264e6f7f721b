"""`tandem router`, `tandem prefill`, `tandem decode`: one process each, the same as `python -m router` and its like."""

from __future__ import annotations

import argparse
import importlib
from functools import partial

from cli.command import Subparsers, add_command
from tandem.config import DecodeConfig, PrefillConfig, RouterConfig, add_arguments, load
from tandem.errors import ConfigError

_READY = "Prints `ready HOST:PORT` on stdout once it listens."


def add_parsers(subparsers: Subparsers) -> None:
    """Declares the three commands."""
    for name, config, what, details in (
        (
            *("router", RouterConfig, "router"),
            "Accepts requests, places them on the workers that register with it, streams their tokens.",
        ),
        (
            *("prefill", PrefillConfig, "prefill worker"),
            "Computes prompts and pushes their KV blocks to decode workers. Registers with every --router.",
        ),
        (
            *("decode", DecodeConfig, "decode worker"),
            "Owns a paged KV pool and decodes in it by continuous batching. Registers with every --router.",
        ),
    ):
        run = partial(_run, what.replace(" ", "_"), config)
        add_arguments(add_command(subparsers, name, run, f"one {what} process", f"{details} {_READY}"), config)


def _run(package: str, config: type[RouterConfig | PrefillConfig | DecodeConfig], namespace: argparse.Namespace) -> int:
    """Runs until SIGTERM; returns the exit code. Raises ConfigError."""
    options = load(config, namespace)
    try:
        app = importlib.import_module(f"{package}.app")  # here: a router's machine has no torch, and needs none
    except ModuleNotFoundError as error:
        raise ConfigError("a worker", f"needs {error.name}; install tandem-server[worker]") from error
    return int(app.run(options))
