"""How a subcommand is declared: a name, a text, the function that runs it, and the types of its numbers."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar

N = TypeVar("N", int, float)

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
    )
    parser.set_defaults(run=run)
    return parser


def _number(kind: Callable[[str], N], allowed: Callable[[N], bool], what: str) -> Callable[[str], N]:
    def parse(text: str) -> N:
        with contextlib.suppress(ValueError):
            if allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


positive = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
natural = _number(int, lambda value: value >= 0, "a whole number, not negative")
count = _number(int, lambda value: value >= 1, "a whole number of at least 1")
