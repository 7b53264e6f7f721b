"""n choices of one request, end to end: equal to single requests, sharing blocks, under whatever happens."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.support.cluster import Cluster, becomes_idle, eventually, serve
from tandem.client import Client
from tandem.client.results import Choice, Completion
from tandem.types import Role
from tests.at_rest import nothing_runs

CHOICES = (1, 2, 3, 5, 8, 16)
SEED = 2**64 - 3
"""So that the seeds of later choices wrap around."""
BLOCK_SIZE = 16


def options(num_prompt_tokens: int, max_tokens: int, **more: object) -> dict[str, object]:
    rng = random.Random(num_prompt_tokens)
    return {
        "token_ids": tuple(rng.randrange(4, 600) for _ in range(num_prompt_tokens)),
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": SEED,
        "ignore_eos": True,
        **more,
    }


def said(choice: Choice) -> tuple[object, ...]:
    alternatives = [[token_id for token_id, _ in each.top] for each in choice.logprobs]
    return choice.token_ids, choice.text, choice.finish_reason, choice.matched_stop, alternatives


def singles(client: Client, n: int, request: dict[str, object]) -> list[tuple[object, ...]]:
    """What n requests of one choice say, each with its own derived seed."""
    requests = [request | {"seed": (SEED + i) % 2**64} for i in range(n)]
    return [said(each.choices[0]) for each in at_once(client, requests)]


def at_once(client: Client, requests: Sequence[dict[str, object]], **more: object) -> list[Completion]:
    with ThreadPoolExecutor(len(requests)) as callers:
        return list(callers.map(lambda each: client.complete(**more, **each), requests))


def together(client: Client, n: int, request: dict[str, object]) -> Completion:
    completion = client.complete(n=n, **request)
    assert [choice.index for choice in completion.choices] == list(range(n))
    return completion


@pytest.fixture(scope="module", params=["shm", "tcp", "colocated"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    way = ("--local-prefill-tokens", "unlimited") if request.param == "colocated" else ("--transport", request.param)
    with serve("demo", "--prefill", "1", "--decode", "1", "--block-size", str(BLOCK_SIZE), *way) as cluster:
        yield cluster
        with Client(cluster.target) as client:
            assert becomes_idle(client, 10), client.status()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        yield client
        assert nothing_runs(client, 10), client.status()


@pytest.mark.parametrize("num_prompt_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, 75])
def test_choices_equal_single_requests_with_the_derived_seeds(client: Client, num_prompt_tokens: int) -> None:
    request = options(num_prompt_tokens, 20)
    completions = [together(client, n, request) for n in CHOICES]  # the first one finds nothing in a cache
    alone = singles(client, max(CHOICES), request)

    for n, completion in zip(CHOICES, completions, strict=True):
        assert [said(choice) for choice in completion.choices] == alone[:n]
        assert completion.usage.prompt_tokens == num_prompt_tokens
        assert completion.usage.completion_tokens == 20 * n


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9, "logprobs": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"min_tokens": 3, "ignore_eos": False, "stop": (".", "e")},
        {"ignore_eos": False, "max_tokens": 1},
    ],
)
def test_every_parameter_means_for_a_choice_what_it_means_for_a_request(
    client: Client, more: dict[str, object]
) -> None:
    request = options(40, 24) | more

    assert [said(choice) for choice in together(client, 6, request).choices] == singles(client, 6, request)


def test_a_stream_carries_every_choice_in_order_and_ends_once_with_the_usage(client: Client) -> None:
    request = options(40, 30)
    token_ids: dict[int, tuple[int, ...]] = {}
    finished: list[int] = []
    usages = []
    for update in client.generate(n=4, **request):
        assert update.index not in finished
        token_ids[update.index] = token_ids.get(update.index, ()) + update.token_ids
        if update.finish_reason is not None:
            finished.append(update.index)
        usages.append(update.usage)

    assert [token_ids[i] for i in range(4)] == [each[0] for each in singles(client, 4, request)]
    assert sorted(finished) == [0, 1, 2, 3]
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 120
    assert usages[:-1] == [None] * (len(usages) - 1)


def test_a_group_holds_the_prompt_once(client: Client) -> None:
    """The pool's own accounting: prompt blocks once, and each choice's completion beside them."""
    n, num_prompt_tokens, max_tokens = 8, 640, 300
    prompt_blocks, own_blocks = num_prompt_tokens // BLOCK_SIZE, -(-max_tokens // BLOCK_SIZE)
    peaks = [0]

    def watch(done: threading.Event) -> None:
        while not done.wait(0.05):
            pools = [each.load.pool for each in client.status().workers if each.info.role is Role.DECODE]
            peaks.append(max(pool.live for pool in pools))

    def one_was_seen() -> bool:
        """One group at a time, until the watcher, who may be late, has looked while it ran."""
        together(client, n, options(num_prompt_tokens, max_tokens))
        return becomes_idle(client, 10) and max(peaks) > prompt_blocks

    assert becomes_idle(client, 10), client.status()  # nothing is seen of what ran before
    done = threading.Event()
    with ThreadPoolExecutor(1) as watcher:
        watching = watcher.submit(watch, done)
        try:
            assert eventually(one_was_seen, 30), peaks
        finally:
            done.set()
        watching.result()

    assert max(peaks) <= prompt_blocks + n * own_blocks
