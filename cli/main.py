"""`tandem`: parses the command line, runs one subcommand, turns errors into exit codes.

0 ok · 1 it failed, with one line on stderr · 2 a bad option · 130 ctrl-C
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial

import tandem
from cli import bench, chat, compile_kernels, doctor, generate, health, plan, serve, status
from cli.command import Subparsers, add_command
from shell.command_line import EXIT_BAD_CONFIG, EXIT_FAILED, CommandLine
from shell.config import DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, add_arguments, load
from shell.progress import show_on_terminal
from shell.rpc.process import hold_standard_streams
from tandem.errors import CheckpointError, ConfigError, TandemError

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tandem ARG…`; returns the exit code."""
    hold_standard_streams()
    parser = CommandLine(
        prog="tandem",
        description="Serves language models with prefill and decode in separate workers.",
        epilog="Every option of a command also reads TANDEM_<OPTION> from the environment where its help says so.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {tandem.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        *(serve.add_parser, _add_processes, generate.add_parser, chat.add_parser),
        *(status.add_parser, health.add_parser, bench.add_parser, plan.add_parser, compile_kernels.add_parser),
        doctor.add_parser,
    ):
        add(subparsers)
    namespace = parser.parse_args(argv)
    show_on_terminal()
    try:
        code = int(namespace.run(namespace))
        sys.stdout.flush()  # here, where a reader that has gone can still be dealt with
        return code
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError | CheckpointError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _add_processes(subparsers: Subparsers) -> None:
    """Declares `tandem router`, `prefill`, `decode` and `worker`: `python -m router` and its like."""
    for name, config, package, what, details in (
        (
            *("router", RouterConfig, "router", "router"),
            "Accepts requests, places them on the workers that register with it, streams their tokens.",
        ),
        (
            *("prefill", PrefillConfig, "prefill_worker", "prefill worker"),
            "Computes prompts and pushes their KV blocks to decode workers. Registers with every --router.",
        ),
        (
            *("decode", DecodeConfig, "decode_worker", "decode worker"),
            "Owns a paged KV pool and decodes in it by continuous batching. Registers with every --router.",
        ),
        (
            *("worker", ElasticConfig, "decode_worker", "elastic worker"),
            "A decode worker that also computes prompts, for itself and for others, in chunks beside its decodes. "
            "Registers with every --router.",
        ),
    ):
        run = partial(_run_process, package, config)
        description = f"{details} Prints `ready HOST:PORT` on stdout once it listens."
        add_arguments(add_command(subparsers, name, run, f"one {what} process", description), config)


def _run_process(
    package: str, config: type[RouterConfig | PrefillConfig | DecodeConfig], namespace: argparse.Namespace
) -> int:
    """Runs until SIGTERM; returns the exit code. Raises ConfigError."""
    options = load(config, namespace)
    try:
        app = importlib.import_module(f"{package}.app")  # here: a router's machine has no torch, and needs none
    except ModuleNotFoundError as error:
        raise ConfigError("a worker", f"needs {error.name}; install the extra `worker`") from error
    return int(app.run(options))


if __name__ == "__main__":
    sys.exit(main())
