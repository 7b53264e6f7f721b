"""Random requests over every parameter of the public API, for the demo model. Pure: same seed, same requests.

Knows neither clients nor servers. Every request that samples carries a seed of its own, so that its
tokens are a function of the request alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from models.demo.text import make_story

VOCAB_SIZE = 631
"""Of the demo model; ids below `_FIRST_TEXT_ID` are special."""
_END_OF_TEXT_ID = 1
_FIRST_TEXT_ID = 4
_MOST_PROMPT_TOKENS = 600
_MOST_OUTPUT_TOKENS = 240
_STOP_STRINGS = (".", " the", "They", " gave", "\n", "town", "red ", "served", "s.", "was quiet", "Mira", "zzz")
_STEM_TOKENS = (40, 200, 500)
"""Of the prompts that others begin like."""
_SALTS = ("", "a", "b")
_CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "(They|We) (gave|showed) [a-z]{3,8} to (Mira|Tom)\\."},
    {"regex": "[a-zé ]{0,60}[.!]"},
    {"choice": ["red", "red kites", "blue lamps", "green boats and hats"]},
    {"grammar": 'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: /[1-9][0-9]{0,2}/ | list'},
    {
        "json_schema": json.dumps(
            {
                "type": "object",
                "properties": {"name": {"enum": ["Mira", "Tom"]}, "age": {"type": "integer", "maximum": 150}},
                "required": ["name"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            }
        )
    },
)
_QUESTIONS = ("What did they give Mira?", "What did they show Tom?", "What did they serve Lena?", "And then?")

MAX_PRIORITY = 5
"""Of any request: what a router must be told to allow (`--max-priority`)."""


@dataclass(frozen=True, slots=True)
class RandomRequest:
    """One request. `options` are keyword arguments of the client's `generate`, the prompt among them."""

    name: str
    options: dict[str, Any]
    streams: bool
    """Whether it is sent by Generate; otherwise by Complete."""


def make_requests(count: int, seed: int) -> tuple[RandomRequest, ...]:
    """`count` requests, named by their numbers."""
    rng = Random(seed)
    return tuple(_request(f"same-{number:03}", rng) for number in range(count))


def make_sharing_requests(count: int, seed: int) -> tuple[RandomRequest, ...]:
    """`count` requests that share: prompts that begin alike, salts, several choices, beams, constraints."""
    rng = Random(seed)
    stems = [_ids(rng, num_tokens) for num_tokens in _STEM_TOKENS]
    return tuple(_sharing(_request(f"share-{number:03}", rng), stems, rng) for number in range(count))


def digest(requests: Sequence[RandomRequest]) -> str:
    """Changes when any of them does."""
    document = [(each.name, each.options, each.streams) for each in requests]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _request(name: str, rng: Random) -> RandomRequest:
    options = {"request_id": name, **_prompt(rng), **_length(rng), **_choosing(rng), **_penalties(rng)}
    options |= _ends(rng) | _report(rng)
    if _chance(rng, 0.2):
        options["priority"] = rng.randint(-MAX_PRIORITY, MAX_PRIORITY)
    return RandomRequest(name, options, streams=_chance(rng, 0.75))


def _chance(rng: Random, share: float) -> bool:
    return rng.random() < share


def _ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_TEXT_ID, VOCAB_SIZE) for _ in range(count)]


def _prompt(rng: Random) -> dict[str, Any]:
    """Ids, lengths spread evenly on a logarithmic scale; or the kind of text that the model was trained on."""
    kind = rng.choice(("ids", "ids", "text", "chat"))
    if kind == "ids":
        return {"token_ids": _ids(rng, round(_MOST_PROMPT_TOKENS ** rng.random()))}
    text = make_story(rng, rng.randint(1, 12)).text
    if kind == "text":
        return {"prompt": text[: rng.randint(1, len(text))]}
    turns = [{"role": "user", "content": f"{text}\n{rng.choice(_QUESTIONS)}"}]
    if _chance(rng, 0.3):
        turns += [{"role": "assistant", "content": "They did."}, {"role": "user", "content": rng.choice(_QUESTIONS)}]
    return {"messages": turns}


def _length(rng: Random) -> dict[str, Any]:
    max_tokens = round(_MOST_OUTPUT_TOKENS ** rng.random())
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if _chance(rng, 0.3):
        options["min_tokens"] = rng.randint(0, max_tokens)
    return options


def _choosing(rng: Random) -> dict[str, Any]:
    """Greedy in a third of all requests; otherwise temperature, filters and a seed."""
    if _chance(rng, 1 / 3):
        return {"temperature": 0.0}
    options: dict[str, Any] = {"seed": rng.getrandbits(64)}
    if _chance(rng, 0.9):
        options["temperature"] = round(rng.uniform(0.1, 2.0), 2)
    if _chance(rng, 0.4):
        options["top_k"] = rng.choice((0, 1, 2, 5, 20, 100, 10_000))
    if _chance(rng, 0.4):
        options["top_p"] = round(rng.uniform(0.05, 1.0), 2)
    if _chance(rng, 0.3):
        options["min_p"] = round(rng.uniform(0.0, 0.5), 2)
    return options


def _penalties(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if _chance(rng, 0.3):
        options["repetition_penalty"] = round(rng.uniform(0.7, 1.8), 2)
    if _chance(rng, 0.3):
        options["presence_penalty"] = round(rng.uniform(-2.0, 2.0), 2)
    if _chance(rng, 0.3):
        options["frequency_penalty"] = round(rng.uniform(-2.0, 2.0), 2)
    return options


def _ends(rng: Random) -> dict[str, Any]:
    """What ends a completion before max_tokens, and what is shown of it."""
    options: dict[str, Any] = {}
    if _chance(rng, 0.3):
        options["stop"] = rng.sample(_STOP_STRINGS, rng.randint(1, 3))
        if _chance(rng, 0.5):
            options["include_stop"] = True
    if _chance(rng, 0.25):
        options["stop_token_ids"] = _ids(rng, rng.choice((1, 8, 60)))
    if _chance(rng, 0.4):
        options["ignore_eos"] = True
    if _chance(rng, 0.3):
        options["skip_special_tokens"] = _chance(rng, 0.3)
    return options


def _report(rng: Random) -> dict[str, Any]:
    """Log-probabilities, and logits moved; among the moved ones special tokens."""
    options: dict[str, Any] = {}
    if _chance(rng, 0.2):
        options["logprobs"] = rng.choice((0, 1, 3, 5))
    if _chance(rng, 0.25):
        moved = [*_ids(rng, rng.randint(1, 6)), *rng.sample(range(_FIRST_TEXT_ID), rng.randint(0, 2))]
        options["logit_bias"] = {token_id: round(rng.uniform(-8.0, 8.0), 2) for token_id in moved}
        if _chance(rng, 0.1):
            options["logit_bias"][_END_OF_TEXT_ID] = -100.0
    return options


def _sharing(request: RandomRequest, stems: Sequence[list[int]], rng: Random) -> RandomRequest:
    options = dict(request.options)
    if _chance(rng, 0.7):
        for name in ("prompt", "token_ids", "messages"):
            options.pop(name, None)
        stem = rng.choice(stems)
        kept = rng.choice((len(stem), rng.randint(1, len(stem))))
        options["token_ids"] = stem[:kept] + _ids(rng, rng.choice((0, 0, 1, rng.randint(1, 40))))
    options["cache_salt"] = rng.choice(_SALTS)
    if _chance(rng, 0.3):
        options |= _beams(rng)
    elif _chance(rng, 0.3):
        options["n"] = rng.randint(2, 3)
    if _chance(rng, 0.35):
        options |= rng.choice(_CONSTRAINTS)
    if _chance(rng, 0.15):
        options["prompt_logprobs"] = rng.choice((0, 1, 3))
    return replace(request, options=options)


def _beams(rng: Random) -> dict[str, Any]:
    beam_width = rng.randint(2, 4)
    options: dict[str, Any] = {"beam_width": beam_width, "n": rng.randint(1, beam_width)}
    if _chance(rng, 0.5):
        options["length_penalty"] = round(rng.uniform(-1.0, 2.0), 2)
    if _chance(rng, 0.5):
        options["early_stopping"] = rng.choice(("heuristic", "always", "never"))
    return options
