"""Beam search end to end: the completions, order and scores of transformers' own, under whatever happens."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from bench.support.cluster import Cluster, becomes_idle, eventually, serve
from bench.support.reference import load_transformers
from models.files.checkpoint import DEMO, resolve_model
from tandem.client import Client
from tandem.client.results import Choice, Completion
from tandem.errors import InvalidRequest
from tandem.types import FinishReason, Role
from tests.at_rest import nothing_runs

BLOCK_SIZE = 16
EOS = 1


def options(num_prompt_tokens: int, max_tokens: int, beam_width: int, **more: object) -> dict[str, Any]:
    rng = random.Random(f"{num_prompt_tokens}")
    return {
        "token_ids": tuple(rng.randrange(4, 600) for _ in range(num_prompt_tokens)),
        "max_tokens": max_tokens,
        "beam_width": beam_width,
        "n": beam_width,
        **more,
    }


def said(choice: Choice) -> tuple[object, ...]:
    return choice.token_ids, choice.text, choice.finish_reason


def assert_same(found: Sequence[Choice], right: Sequence[Choice]) -> None:
    """Scores but for rounding: how many rows share a product, and where a prompt is cut, change the last bits."""
    assert [said(each) for each in found] == [said(each) for each in right]
    assert [each.score for each in found] == pytest.approx([each.score for each in right], rel=1e-5)


@cache
def model() -> Any:
    return load_transformers(resolve_model(DEMO), torch.float32)


def expected(request: dict[str, Any]) -> list[tuple[tuple[int, ...], float]]:
    """Completions, up to the token that ends them, and scores."""
    return found_by_transformers(tuple(sorted(request.items())))


@cache
def found_by_transformers(options: tuple[tuple[str, Any], ...]) -> list[tuple[tuple[int, ...], float]]:
    """Once for all ways of serving."""
    request = dict(options)
    prompt, ends = request["token_ids"], [EOS, *request.get("stop_token_ids", ())]
    early_stopping = {"heuristic": False, "always": True, "never": "never"}[request.get("early_stopping", "heuristic")]
    out = model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=request["beam_width"],
        num_return_sequences=request["n"],
        do_sample=False,
        max_new_tokens=request["max_tokens"],
        min_new_tokens=request.get("min_tokens"),
        repetition_penalty=request.get("repetition_penalty", 1.0),
        length_penalty=request.get("length_penalty", 1.0),
        early_stopping=early_stopping,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for tokens, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        at = next((i for i, token_id in enumerate(tokens) if token_id in ends), len(tokens) - 1)
        found.append((tuple(tokens[: at + 1]), score))
    return found


def assert_found(choices: tuple[Choice, ...], right: list[tuple[tuple[int, ...], float]]) -> None:
    assert [choice.index for choice in choices] == list(range(len(right)))
    assert [choice.token_ids for choice in choices] == [tokens for tokens, _ in right]
    # A score is a mean of differences of logits near 20, in float32, which has steps of 2e-6 there.
    assert [choice.score for choice in choices] == pytest.approx([score for _, score in right], rel=1e-4, abs=1e-6)


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


@pytest.mark.parametrize("beam_width", [2, 3, 4, 8])
@pytest.mark.parametrize("num_prompt_tokens", [1, BLOCK_SIZE, 75])
def test_what_is_served_is_what_transformers_finds(client: Client, beam_width: int, num_prompt_tokens: int) -> None:
    request = options(num_prompt_tokens, 40, beam_width)

    completion = client.complete(**request)

    assert_found(completion.choices, expected(request))
    assert completion.usage.completion_tokens == sum(len(choice.token_ids) for choice in completion.choices)


@pytest.mark.parametrize(
    "more",
    [
        {"early_stopping": "always", "stop_token_ids": (17, 30, 41)},
        {"early_stopping": "never", "stop_token_ids": tuple(range(20, 60)), "length_penalty": 2.0},
        {"length_penalty": 0.0, "stop_token_ids": tuple(range(20, 60))},
        {"length_penalty": -1.0, "stop_token_ids": tuple(range(20, 60)), "min_tokens": 5},
        {"repetition_penalty": 1.25},
        {"max_tokens": 1},
        {"n": 2},
    ],
)
def test_every_parameter_means_what_it_means_there(client: Client, more: dict[str, Any]) -> None:
    request = options(33, 24, 4) | more

    assert_found(client.complete(**request).choices, expected(request))


def test_a_stream_brings_each_choice_with_its_score_at_its_end(client: Client) -> None:
    request = options(40, 20, 3)
    choices = client.complete(**request).choices
    token_ids: dict[int, tuple[int, ...]] = {}
    scores: dict[int, float | None] = {}
    for update in client.generate(**request):
        token_ids[update.index] = token_ids.get(update.index, ()) + update.token_ids
        if update.finish_reason is not None:
            scores[update.index] = update.score

    assert [token_ids[choice.index] for choice in choices] == [choice.token_ids for choice in choices]
    assert [scores[choice.index] for choice in choices] == [choice.score for choice in choices]


def test_log_probabilities_are_those_that_make_up_the_score(client: Client) -> None:
    choices = client.complete(**options(40, 20, 3, logprobs=2)).choices

    for choice in choices:
        total = sum(each.logprob for each in choice.logprobs)
        assert choice.score == pytest.approx(total / len(choice.token_ids), rel=1e-4)
        assert [each.token_id for each in choice.logprobs] == list(choice.token_ids)
        assert all(len(each.top) == 2 for each in choice.logprobs)


def test_a_stop_string_cuts_the_text_of_each_choice(client: Client) -> None:
    request = options(40, 30, 4)
    whole = client.complete(**request).choices
    stop = whole[0].text[len(whole[0].text) // 2]

    cut = client.complete(**request, stop=[stop]).choices

    assert [choice.text for choice in cut] == [choice.text.split(stop)[0] for choice in whole]
    assert cut[0].finish_reason is FinishReason.STOP
    assert [choice.score for choice in cut] == [choice.score for choice in whole]


def test_a_client_that_leaves_frees_every_beam(client: Client) -> None:
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(client.complete, timeout_s=0.3, **options(200, 700, 16))
        assert waiting.exception() is not None

    assert becomes_idle(client, 5), client.status()


def test_a_pool_too_small_for_all_searches_changes_nothing() -> None:
    requests = [options(60 + i, 60, 5) for i in range(5)]
    with serve("demo", "--kv-blocks", "48", "--block-size", "16") as small, Client(small.target) as client:
        client.wait_ready(timeout_s=30)
        for _ in range(8):  # as many short completions as a worker remembers: it expects the next ones to be short, too
            client.complete(n=16, token_ids=(5, 6), max_tokens=2, temperature=1.0, ignore_eos=True)
        with ThreadPoolExecutor(len(requests)) as callers:
            futures = [callers.submit(client.complete, **each) for each in requests]
            completions = [future.result(timeout=120) for future in futures]

        for request, completion in zip(requests, completions, strict=True):
            assert_found(completion.choices, expected(request))
        assert becomes_idle(client, 10), client.status()  # by newer heartbeats, which tell of preemptions, too
        assert sum(worker.load.preemptions for worker in client.status().workers) > 0
        with pytest.raises(InvalidRequest, match=r"sampling\.beam_width: "):
            client.complete(**options(600, 10, 16))


@pytest.fixture(scope="module")
def running_pairs() -> Iterator[Client]:
    """Two prefill and two decode workers, of which earlier tests of a file may have killed some."""
    with serve("demo", "--prefill", "2", "--decode", "2") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        yield client


@pytest.fixture
def pairs(running_pairs: Client) -> Client:
    """All four of them, at rest: those that were killed are back."""

    def whole() -> bool:
        workers = running_pairs.status().workers
        return len(workers) == 4 and all(worker.connected for worker in workers)

    assert eventually(whole, 30), running_pairs.status()
    assert becomes_idle(running_pairs, 10), running_pairs.status()
    return running_pairs


TO_BE_DISTURBED = [options(60 + 40 * i, 100, 4) for i in range(4)]


@pytest.fixture(scope="module")
def undisturbed(running_pairs: Client) -> list[tuple[Choice, ...]]:
    with ThreadPoolExecutor(len(TO_BE_DISTURBED)) as callers:
        return [each.choices for each in callers.map(lambda each: running_pairs.complete(**each), TO_BE_DISTURBED)]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_killed_in_the_middle_changes_nothing(
    pairs: Client, undisturbed: list[tuple[Choice, ...]], role: Role
) -> None:
    with ThreadPoolExecutor(len(TO_BE_DISTURBED)) as callers:
        futures: list[Future[Completion]] = []

        def a_search_runs() -> bool:
            if all(future.done() for future in futures):  # asked again: whoever looks may be late
                futures.extend(callers.submit(pairs.complete, timeout_s=60, **each) for each in TO_BE_DISTURBED)
            return any(worker.load.running_seqs >= 4 for worker in pairs.status().workers)

        assert eventually(a_search_runs, 20)
        workers = [each for each in pairs.status().workers if each.info.role is role]
        busiest = max(workers, key=lambda worker: worker.load.pool.live)
        os.kill(busiest.info.pid, signal.SIGKILL)
        completions = [future.result(timeout=90) for future in futures]

    for completion, choices in zip(completions, undisturbed * (len(completions) // len(undisturbed)), strict=True):
        assert_same(completion.choices, choices)
    assert eventually(lambda: busiest.info.pid not in {each.info.pid for each in pairs.status().workers})
