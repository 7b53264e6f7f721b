"""Loads to replay: who asks when, how long prompts and answers are, and what prompts have in common. Pure, by seed.

A prompt is a list of pieces; pieces of the same name have the same tokens, so that prompts which begin with the same
pieces share KV. An answer's tokens are known too (`engine.OUTPUT_TOKEN`): the next turn of a conversation begins with
the whole of the one before. Turns come at times of their own, whether or not the one before was answered in time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeAlias

from simulator.engine import OUTPUT_TOKEN
from tandem.errors import ConfigError
from tandem.types import TokenId

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one of `hash_ids` stands for in the traces published with Mooncake (arXiv 2407.00079)."""
_ANSWER = int(OUTPUT_TOKEN)


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of a prompt: a number of tokens of one name; name 0 is an earlier answer."""

    name: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    at_s: float
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all pieces."""
        return sum(piece.num_tokens for piece in self.pieces)

    def token_ids(self) -> tuple[TokenId, ...]:
        """The prompt."""
        return tuple([TokenId(piece.name) for piece in self.pieces for _ in range(piece.num_tokens)])


Trace: TypeAlias = Sequence[Ask]
"""In order of time."""
MakeTrace: TypeAlias = Callable[[float], Trace]
"""The same requests at a rate, per second."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths, cut to `least` … `most`."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, rng: Random) -> int:
        """Draws a value."""
        return min(self.most, max(self.least, round(self.median * math.exp(rng.gauss(0, self.sigma)))))


def poisson(rate_per_s: float, count: int, rng: Random) -> Iterator[float]:
    """Arrival times without memory."""
    return gamma(rate_per_s, count, rng, 1.0)


def gamma(rate_per_s: float, count: int, rng: Random, variation: float) -> Iterator[float]:
    """Arrival times whose gaps have this coefficient of variation; above 1 they come in bursts."""
    shape = 1 / variation**2
    at_s = 0.0
    for _ in range(count):
        at_s += rng.gammavariate(shape, 1 / (shape * rate_per_s))
        yield at_s


def independent(
    prompt: LogNormal, output: LogNormal, rate_per_s: float, count: int, seed: int, variation: float = 1.0
) -> Trace:
    """Prompts that have nothing in common."""
    rng = Random(seed)
    lengths = [(prompt.draw(rng), output.draw(rng)) for _ in range(count)]
    times = gamma(rate_per_s, count, rng, variation)
    return [
        Ask(at_s, (Piece(number, prompt_tokens),), output_tokens)
        for number, (at_s, (prompt_tokens, output_tokens)) in enumerate(zip(times, lengths, strict=True), _ANSWER + 1)
    ]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """How conversations, or the calls of agents, go on."""

    system_tokens: int
    """Which all have in common."""
    turns: LogNormal
    words: LogNormal
    """New tokens of a turn: a question, or what a tool returned."""
    answer: LogNormal
    pause_s: float
    """Mean time from one turn to the next, beside what the answer takes."""
    answer_s: float = 0.02
    """Per token of an answer, for the time of the next turn."""


def conversation(dialogue: Dialogue, rate_per_s: float, count: int, seed: int) -> Trace:
    """`count` turns at `rate_per_s` on average, each of which begins with all before it, from the middle of many talks.

    Talks begin as a Poisson process; the first turns that come are left out until the longest talk could have ended.
    """
    rng = Random(seed)
    length = dialogue.turns
    longest_s = length.most * (dialogue.answer_s * dialogue.answer.most + 2 * dialogue.pause_s)
    mean_turns = sum(length.draw(rng) for _ in range(1000)) / 1000
    until_s = longest_s + 1.5 * count / rate_per_s + 1.0
    at_s, asks, names = 0.0, list[Ask](), itertools.count(_ANSWER + 2)
    while at_s < until_s:
        at_s += rng.expovariate(rate_per_s / mean_turns)
        asks += _talk(dialogue, at_s, rng, names)
    asks.sort(key=lambda ask: ask.at_s)
    settled = [replace(ask, at_s=ask.at_s - longest_s) for ask in asks if ask.at_s >= longest_s]
    return settled[:count]


def _talk(dialogue: Dialogue, at_s: float, rng: Random, names: Iterator[int]) -> Iterator[Ask]:
    """All its turns."""
    pieces: tuple[Piece, ...] = (Piece(_ANSWER + 1, dialogue.system_tokens),) if dialogue.system_tokens else ()
    for _ in range(dialogue.turns.draw(rng)):
        pieces = (*pieces, Piece(next(names), dialogue.words.draw(rng)))
        answer = dialogue.answer.draw(rng)
        yield Ask(at_s, pieces, answer)
        pieces = (*pieces, Piece(_ANSWER, answer))
        at_s += dialogue.answer_s * answer + rng.expovariate(1 / dialogue.pause_s)


def read_jsonl(path: Path) -> Trace:
    """As Mooncake's are: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`; the first one is at 0.

    Raises ConfigError.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        asks = [_ask_of(line, number) for number, line in enumerate(lines)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--trace", f"cannot read {path}: {error}") from error
    if not asks:
        raise ConfigError("--trace", f"{path} has no requests")
    first_s = min(ask.at_s for ask in asks)
    return sorted((replace(ask, at_s=ask.at_s - first_s) for ask in asks), key=lambda ask: ask.at_s)


def _ask_of(line: Mapping[str, object], number: int) -> Ask:
    length, output = int(str(line["input_length"])), int(str(line["output_length"]))
    if length < 1 or output < 1:
        raise ValueError(f"line {number + 1}: lengths must be positive")
    hashes = line.get("hash_ids") or []
    if not isinstance(hashes, list):
        raise TypeError(f"line {number + 1}: hash_ids is no list")
    pieces: list[Piece] = []
    left = length
    for name in hashes:
        if left > 0:
            pieces.append(Piece(_ANSWER + 1 + int(name), min(left, MOONCAKE_BLOCK_TOKENS)))
            left -= pieces[-1].num_tokens
    if left > 0:
        pieces.append(Piece(2**30 + number, left))
    return Ask(float(str(line["timestamp"])) / 1000, tuple(pieces), output)


def rate_of(trace: Trace) -> float:
    """Requests per second."""
    span_s = trace[-1].at_s - trace[0].at_s
    return (len(trace) - 1) / span_s if span_s > 0 else math.inf


def at_rate(trace: Trace, rate_per_s: float) -> Trace:
    """The same requests, faster or slower."""
    factor = rate_of(trace) / rate_per_s
    return [replace(ask, at_s=(ask.at_s - trace[0].at_s) * factor) for ask in trace]
