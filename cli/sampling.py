"""Sampling options as flags, shared by the commands that generate."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, cast

from tandem.client import GenerateOptions

_GROUP = (
    "sampling (left out: the model's generation_config.json, then the server's default; "
    "a server refuses by name what it does not support)"
)

_SCALARS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("max-tokens", int, "most tokens to generate"),
    ("min-tokens", int, "no end before this many tokens"),
    ("temperature", float, "0 = always the most likely token"),
    ("top-k", int, "keep the K most likely tokens; 0 = all"),
    ("top-p", float, "keep the smallest set of tokens with this probability"),
    ("min-p", float, "keep tokens with at least this share of the best one's probability"),
    ("repetition-penalty", float, "divides the logits of tokens seen in prompt or output"),
    ("presence-penalty", float, "subtracted once from the logits of generated tokens"),
    ("frequency-penalty", float, "subtracted per occurrence from the logits of generated tokens"),
    ("seed", int, "same seed, same request: same tokens"),
    ("n", int, "how many choices to generate"),
    ("beam-width", int, "beams of a beam search, whose n best are the choices"),
    ("length-penalty", float, "exponent on the length that divides a beam's score"),
    ("early-stopping", str, "when a beam search stops: heuristic, always (as many as beams are found) or never"),
    ("logprobs", int, "report log-probabilities and this many alternatives (shown with --json)"),
    ("prompt-logprobs", int, "the same for the prompt"),
    ("json-schema", str, "JSON schema that the text must match"),
    ("regex", str, "regular expression that the text must match"),
    ("grammar", str, "Lark grammar that the text must match"),
)
_KINDS: Mapping[Callable[[str], Any], str] = {int: "N", float: "NUMBER", str: "TEXT"}
"""As the help shows them."""
_REPEATED: tuple[tuple[str, str, str], ...] = (
    ("stop", "TEXT", "end where this text appears; may be repeated"),
    ("choice", "TEXT", "one of the allowed answers; may be repeated"),
)
_SWITCHES: tuple[tuple[str, str], ...] = (
    ("include-stop", "keep the matched stop text"),
    ("ignore-eos", "treat end-of-text as an ordinary token"),
    ("skip-special-tokens", "leave special tokens out of the text"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of `SamplingOptions`."""
    group = parser.add_argument_group(_GROUP)
    for name, kind, text in _SCALARS:
        group.add_argument(f"--{name}", type=kind, metavar=_KINDS[kind], help=text)
    for name, metavar, text in _REPEATED:
        group.add_argument(f"--{name}", action="append", metavar=metavar, help=text)
    for name, text in _SWITCHES:
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    group.add_argument("--stop-token-ids", type=token_ids, metavar="ID,…", help="end after one of these tokens")
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=VALUE",
        help="added to a token's logit; may be repeated",
    )


def generate_options(namespace: argparse.Namespace) -> GenerateOptions:
    """The options that were given: of sampling, and those that a command parses into other names of GenerateOptions."""
    given: dict[str, Any] = {
        name: value for name in GenerateOptions.__annotations__ if (value := getattr(namespace, name, None)) is not None
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return cast("GenerateOptions", given)  # its keys come from the annotations


def token_ids(text: str) -> list[int]:
    """Parses `1,2,3`."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from error


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 42=-1.5") from error
