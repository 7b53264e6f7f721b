"""`tandem chat`: a conversation in the terminal; this side keeps its history."""

from __future__ import annotations

import argparse
import contextlib
import sys

from cli.command import Subparsers, add_command
from cli.sampling import add_sampling_arguments, generate_options
from tandem.client import Client, GenerateOptions, Message
from tandem.config import ClientConfig, add_arguments, load
from tandem.errors import TandemError

_PROMPT = "> "
_RESET = "/reset"


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "chat",
        run,
        "a conversation in the terminal",
        f"{_RESET} forgets the conversation, ctrl-C stops an answer, ctrl-D leaves.",
    )
    parser.add_argument("--system", metavar="TEXT", help="first message, of role system")
    add_arguments(parser, ClientConfig)
    add_sampling_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Reads lines until the end of input. Raises TandemError if the server cannot be reached at all."""
    config = load(ClientConfig, namespace)
    with Client(config.target, security=config.security) as client:
        served = client.model()
        print(f"{served.model} at {config.target}, {served.context_tokens} tokens of context", file=sys.stderr)
        Conversation(client, generate_options(namespace), config.timeout_s, namespace.system).run()
    return 0


class Conversation:
    """The turns so far. Every answered turn is a user's message and an assistant's."""

    def __init__(self, client: Client, options: GenerateOptions, timeout_s: float, system: str | None) -> None:
        self._client = client
        self._options = options
        self._timeout_s = timeout_s
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._opening)

    def run(self) -> None:
        """One turn per line of input, until it ends."""
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
