"""`tandem`: parses the command line, runs one subcommand, turns errors into exit codes.

0 ok · 1 it failed, with one line on stderr · 2 a bad option · 130 ctrl-C
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import tandem
from cli import bench, chat, doctor, generate, health, process, serve, status
from tandem.errors import CheckpointError, ConfigError, TandemError
from tandem.progress import show_on_terminal
from tandem.rpc.process import EXIT_BAD_CONFIG, EXIT_FAILED

EXIT_INTERRUPTED = 130

_COMMANDS = (
    *(serve.add_parser, process.add_parsers, generate.add_parser, chat.add_parser),
    *(status.add_parser, health.add_parser, bench.add_parser, doctor.add_parser),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tandem ARG…`; returns the exit code."""
    namespace = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Serves language models with prefill and decode in separate workers.",
        epilog="Every option of a command also reads TANDEM_<OPTION> from the environment where its help says so.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tandem {tandem.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
