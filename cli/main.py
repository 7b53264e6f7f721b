"""`tandem`: parses the command line, runs one subcommand, turns errors into exit codes.

0 ok · 1 it failed, with one line on stderr · 2 a bad option · 130 ctrl-C

Imports the module of the one command that is run: version and help need none of them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import tandem
from cli.command import COMMANDS, Subparsers
from shell.command_line import EXIT_BAD_CONFIG, EXIT_FAILED, CommandLine
from shell.progress import show_on_terminal
from shell.standard_streams import hold_standard_streams
from tandem.errors import CheckpointError, ConfigError, TandemError
from tandem.options import meant

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tandem ARG…`; returns the exit code."""
    hold_standard_streams()
    namespace = _parsed(sys.argv[1:] if argv is None else argv)
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


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options of one command. Ends the process after help or version, and if they are wrong."""
    parser = CommandLine(
        prog="tandem",
        description="Serves language models with prefill and decode in separate workers.",
        epilog="Every option of a command also reads TANDEM_<OPTION> from the environment where its help says so.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {tandem.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    if not argv or argv[0] not in COMMANDS:
        _end_without_command(parser, subparsers, argv)
    importlib.import_module(COMMANDS[argv[0]].module).add_parser(subparsers)
    return parser.parse_args(argv)


def _end_without_command(parser: CommandLine, subparsers: Subparsers, argv: Sequence[str]) -> NoReturn:
    """Ends the process: shows help or version, or refuses what is no command."""
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.summary)
    hint = "`tandem --help` lists what there is"
    if argv and not argv[0].startswith("-"):
        parser.error(f"{argv[0]}: no such command; {meant(argv[0], COMMANDS, hint)}")
    parser.parse_args(argv[:1])
    parser.error(f"a command is missing; {hint}")


if __name__ == "__main__":
    sys.exit(main())
