"""`tandem generate`: streams an answer to the terminal, or as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict

from cli.command import Subparsers, add_command
from cli.sampling import add_sampling_arguments, generate_options, token_ids
from shell.config import ClientConfig, add_arguments, load
from tandem.client import Client, GenerateOptions, GenerationUpdate
from tandem.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "generate",
        run,
        "Text goes to stdout as it comes. Ctrl-C cancels the request.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; left out: read from stdin")
    parser.add_argument(
        "--token-ids", type=token_ids, metavar="ID,…", help="the prompt as token ids, instead of a text"
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message, with chat template")
    parser.add_argument("--json", action="store_true", help="print each message of the stream as one line of JSON")
    parser.add_argument("--verbose", action="store_true", help="print usage and timings on stderr")
    parser.add_argument("--request-id", metavar="ID", help="shown in the server's logs and traces")
    parser.add_argument("--served-model", dest="model", metavar="NAME", help="fail if the server serves another model")
    parser.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="larger goes first while requests wait; above 0 only if the router allows it",
    )
    parser.add_argument("--cache-salt", metavar="TEXT", help="share cached prefixes only with requests of equal salt")
    add_arguments(parser, ClientConfig)
    add_sampling_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Streams an answer. Raises TandemError."""
    config = load(ClientConfig, namespace)
    text, options = _request(namespace)
    last: GenerationUpdate | None = None
    with (
        Client(config.target, security=config.security) as client,
        contextlib.closing(client.generate(text, timeout_s=config.timeout_s, **options)) as updates,
    ):
        for last in updates:
            if namespace.json:
                print(json.dumps(asdict(last), ensure_ascii=False), flush=True)
            else:
                print(last.text, end="", flush=True)
    if not namespace.json:
        print()
    if namespace.verbose and last is not None:
        print(summary(last), file=sys.stderr)
    return 0


def summary(last: GenerationUpdate) -> str:
    """Usage and timings of a finished stream, for people."""
    parts = [f"finish: {last.finish_reason}"]
    if last.matched_stop is not None:
        parts.append(f"stop: {last.matched_stop!r}")
    if last.usage is not None:
        parts.append(
            f"tokens: {last.usage.prompt_tokens} prompt ({last.usage.cached_tokens} cached)"
            f" + {last.usage.completion_tokens} completion"
        )
    if last.timings is not None:
        times = last.timings
        parts.append(
            f"ms: queue {times.queue_s * 1e3:.1f}, prefill {times.prefill_s * 1e3:.1f},"
            f" transfer {times.transfer_s * 1e3:.1f} ({times.transfer_bytes} bytes),"
            f" first token {times.first_token_s * 1e3:.1f}, total {times.total_s * 1e3:.1f}"
        )
    return "\n".join(parts)


def _request(namespace: argparse.Namespace) -> tuple[str | None, GenerateOptions]:
    """Returns the prompt's text, if the prompt is text, and everything else."""
    options = generate_options(namespace)
    if namespace.token_ids is not None:
        if namespace.prompt is not None or namespace.chat:
            raise ConfigError("--token-ids", "excludes PROMPT and --chat")
        return None, options
    try:
        text = sys.stdin.buffer.read().decode() if namespace.prompt is None else str(namespace.prompt)
    except UnicodeDecodeError as error:
        raise ConfigError("PROMPT", f"stdin is not UTF-8 at byte {error.start}") from error
    if namespace.chat:
        options["messages"] = [{"role": "user", "content": text}]
        return None, options
    return text, options
