"""Prompts that were computed before, through real processes: the same tokens, and fewer of them computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.support.cluster import becomes_idle, serve
from tandem.client import Client, Completion

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
DRAWN = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 24}


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, 600) for _ in range(length))


def tokens_of(completion: Completion) -> list[tuple[int, ...]]:
    return [tuple(choice.token_ids) for choice in completion.choices]


@pytest.fixture(
    scope="module",
    params=[("shm", 16, 128), ("tcp", 1, 64), ("shm", 256, 64)],
    ids=lambda way: f"{way[0]}, blocks of {way[1]}, chunks of {way[2]}",
)
def way(request: pytest.FixtureRequest) -> tuple[str, int, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client(way: tuple[str, int, int]) -> Iterator[Client]:
    """Pools of 4096 tokens, so that what is not used for long is evicted."""
    transport, block_size, chunk_tokens = way
    options = (
        *("--prefill", "1", "--decode", "1", "--dtype", "float32", "--transport", transport),
        *("--block-size", str(block_size), "--chunk-tokens", str(chunk_tokens)),
        *("--kv-blocks", str(4096 // block_size), "--patience-seconds", "60"),
    )
    with serve("demo", *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=60)
        yield client
        assert becomes_idle(client, 15), client.status()


def test_a_found_prompt_gives_the_tokens_of_one_that_is_computed(client: Client, way: tuple[str, int, int]) -> None:
    block_size, prompt = way[1], prompt_of(1, 600)
    for sampling in (GREEDY, DRAWN):
        salts = {"cache_salt": f"found {sampling['temperature']}"}
        first = client.complete(token_ids=prompt, **salts, **sampling)
        again = client.complete(token_ids=prompt, **salts, **sampling)
        assert tokens_of(again) == tokens_of(first)
        assert first.usage.cached_tokens == 0
        assert again.usage.cached_tokens == 599 // block_size * block_size
        assert client.complete(token_ids=prompt[:300], **salts, **GREEDY).usage.cached_tokens == (
            299 // block_size * block_size
        )


def test_a_conversation_finds_its_earlier_turns(client: Client, way: tuple[str, int, int]) -> None:
    history: tuple[int, ...] = prompt_of(2, 300)
    for turn in range(3):
        found = client.complete(token_ids=history, cache_salt="talk", **GREEDY)
        fresh = client.complete(token_ids=history, cache_salt=f"alone {turn}", **GREEDY)
        assert tokens_of(found) == tokens_of(fresh)
        assert fresh.usage.cached_tokens == 0
        assert (found.usage.cached_tokens >= 300 // way[1] * way[1]) == (turn > 0)
        history += (*found.choices[0].token_ids, *prompt_of(3 + turn, 40))


def test_crowds_that_evict_each_other_give_the_tokens_that_each_gives_alone(client: Client) -> None:
    stems = [prompt_of(20 + number, 700) for number in range(6)]
    prompts = [stem + prompt_of(100 + number, 30) for number, stem in enumerate(stems * 3)]
    expected = [tokens_of(client.complete(token_ids=each, cache_salt="alone", **DRAWN)) for each in prompts]
    with ThreadPoolExecutor(6) as callers:
        results: Any = callers.map(lambda each: client.complete(token_ids=each, cache_salt="crowd", **DRAWN), prompts)
        assert [tokens_of(each) for each in results] == expected
