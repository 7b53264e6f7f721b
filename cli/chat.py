"""`tandem chat`: a conversation in the terminal; this side keeps its history."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from cli.command import Subparsers, add_command
from cli.sampling import add_sampling_arguments, generate_options
from shell.config import ClientConfig, add_arguments, load
from tandem.client import Client, GenerateOptions, Message
from tandem.errors import TandemError

_PROMPT = "> "
_RESET = "/reset"


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "chat",
        run,
        f"{_RESET} forgets the conversation, ctrl-C stops an answer, ctrl-D leaves.",
    )
    parser.add_argument("--system", metavar="TEXT", help="first message, of role system")
    parser.add_argument(
        "--template-variable",
        metavar="NAME=JSON",
        action="append",
        default=[],
        type=_variable,
        help="variable of the chat template, such as enable_thinking=false for Qwen3; may be repeated",
    )
    add_arguments(parser, ClientConfig)
    add_sampling_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Reads lines until the end of input. Raises TandemError if the server cannot be reached at all."""
    config = load(ClientConfig, namespace)
    with Client(config.target, security=config.security) as client:
        served = client.model()
        print(f"{served.model} at {config.target}, {served.context_tokens} tokens of context", file=sys.stderr)
        options = generate_options(namespace)
        if namespace.template_variable:
            options["template_variables"] = dict(namespace.template_variable)
        Conversation(client, options, config.timeout_s, namespace.system).run()
    return 0


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        return name, json.loads(value if equals else "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON, such as enable_thinking=false") from error


class Conversation:
    """The turns so far. Every answered turn is a user's message and an assistant's."""

    def __init__(self, client: Client, options: GenerateOptions, timeout_s: float, system: str | None) -> None:
        self._client = client
        self._options = options
        self._timeout_s = timeout_s
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._opening)

    def run(self) -> None:
        """Runs a turn per line of input, until the input ends."""
        while True:
            try:
                line = input(_PROMPT if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == _RESET:
                self.messages = list(self._opening)
            elif line:
                self.take_turn(line)

    def take_turn(self, text: str) -> None:
        """Asks, prints the answer, remembers both; an answer that failed is forgotten with its question."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
        except TandemError as error:
            print(f"\ntandem: {error.message}", file=sys.stderr)
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        """The answer, or as much as there was when ctrl-C came."""
        parts: list[str] = []
        options = self._options.copy()
        options["messages"] = self.messages
        with (
            contextlib.closing(self._client.generate(timeout_s=self._timeout_s, **options)) as updates,
            contextlib.suppress(KeyboardInterrupt),
        ):
            for update in updates:
                parts.append(update.text)
                print(update.text, end="", flush=True)
        print()
        return "".join(parts)
