"""Quantized KV end to end: the same tokens whichever worker computed it, however it travelled, found again or not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.support.cluster import becomes_idle, serve
from tandem.client import Client
from tandem.client.results import Completion

SIZE = ("--block-size", "16", "--chunk-tokens", "64", "--kv-blocks", "200")
COLOCATED = ("--local-prefill-tokens", "unlimited")
LENGTHS = (1, 15, 64, 65, 300)
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
DRAWN: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 5, "n": 2}
BEAMS: dict[str, Any] = {"max_tokens": 24, "beam_width": 3, "n": 3}


def prompt_of(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(4, 600) for _ in range(length))


def said(completion: Completion) -> list[tuple[int, ...]]:
    return [tuple(choice.token_ids) for choice in completion.choices]


def completions(kv_dtype: str, *way: str) -> list[list[tuple[int, ...]]]:
    """Every prompt in every way to choose tokens, each twice: computed, and found in the cache."""
    options = ("--prefill", "1", "--decode", "1", "--kv-dtype", kv_dtype, *SIZE, *way)
    with serve("demo", *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=60)
        calls = [{"token_ids": prompt_of(length), **how} for length in LENGTHS for how in (GREEDY, DRAWN, BEAMS)]
        with ThreadPoolExecutor(len(calls)) as callers:
            first, again = (list(callers.map(lambda call: said(client.complete(**call)), calls)) for _ in range(2))
        assert again == first
        assert client.complete(token_ids=prompt_of(300), **GREEDY).usage.cached_tokens == 288
        assert becomes_idle(client, 15), client.status()
        return first


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kv_dtype", "transports"), [("int8", ["shm", "tcp"]), ("fp8", ["shm"])])
def test_tokens_are_the_same_over_every_transport_and_colocated(kv_dtype: str, transports: list[str]) -> None:
    colocated = completions(kv_dtype, *COLOCATED)
    for transport in transports:
        assert completions(kv_dtype, "--transport", transport) == colocated, transport
