"""How a subcommand is declared: a name, a text, and the function that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Run: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed command line, returns the exit code. Raises TandemError."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    subparsers: Subparsers, name: str, run: Run, summary: str, details: str = ""
) -> argparse.ArgumentParser:
    """Adds a subcommand; `main` finds `run` in the parsed namespace."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}".strip(),
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser
