"""The subcommands, and how one is declared: a name, a text, the function that runs it, and the types of its numbers."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from shell.command_line import CommandLine

N = TypeVar("N", int, float)

Run: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed command line, returns the exit code. Raises TandemError."""

Subparsers: TypeAlias = "argparse._SubParsersAction[CommandLine]"


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: where `add_parser` declares it, imported if it is run, and its line of `tandem --help`."""

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "serve": Command("cli.serve", "router and workers as supervised child processes on this machine"),
    "router": Command("cli.processes", "one router process"),
    "prefill": Command("cli.processes", "one prefill worker process"),
    "decode": Command("cli.processes", "one decode worker process"),
    "worker": Command("cli.processes", "one elastic worker process"),
    "generate": Command("cli.generate", "continue a prompt, streaming to the terminal"),
    "chat": Command("cli.chat", "a conversation in the terminal"),
    "status": Command("cli.status", "workers, roles, pools, queues and transfers of a cluster"),
    "health": Command("cli.health", "whether a process serves, as an exit code"),
    "bench": Command("cli.bench", "load on a running server: TTFT, ITL, TPOT, throughput, goodput at an SLO"),
    "plan": Command("cli.plan", "how many workers of each role a load needs"),
    "compile": Command("cli.compile_kernels", "a model's kernels for GPUs, into a folder that workers start from"),
    "doctor": Command("cli.doctor", "which kernels and transports work here, and why the others don't"),
}


def add_command(subparsers: Subparsers, name: str, run: Run, details: str) -> CommandLine:
    """Adds a subcommand of `COMMANDS`; `main` finds `run` in the parsed namespace."""
    summary = COMMANDS[name].summary
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}",
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
not_negative = _number(float, lambda value: 0 <= value < math.inf, "a number from 0")
natural = _number(int, lambda value: value >= 0, "a whole number, not negative")
count = _number(int, lambda value: value >= 1, "a whole number of at least 1")
