"""Everything that shares, at once: the answers are those of a cluster that shares nothing between requests.

Requests are drawn from a seed (`bench.support.random_requests`): prompts that begin alike, salts, choices, beams,
constraints, every sampling parameter, log-probabilities. So are the clusters: block size, chunks, pools, local prefill.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from bench.support.cluster import becomes_idle, eventually, serve
from bench.support.random_requests import MAX_PRIORITY, RandomRequest, make_sharing_requests
from bench.support.reference import load_transformers
from models.files.checkpoint import DEMO, read_checkpoint, resolve_model
from models.grammar import GrammarCompiler
from tandem.client import Client, Completion
from tandem.errors import TandemError
from tandem.types import Constraint, FinishReason, Language, Role, TokenLogprobs

SEED = 17
NUM_REQUESTS = 30
CALLERS = 8
COMMON = ("--max-priority", str(MAX_PRIORITY), "--patience-seconds", "60")
LOGPROB_TOLERANCE = 0.002
"""Sums come in another order in batches of another size."""
Answers = Mapping[str, Completion]


def draw_cluster(transport: str) -> tuple[str, ...]:
    """Pools that hold little more than the largest request; evicted blocks go to a host tier in half of all draws."""
    rng = Random(f"{SEED}/{transport}")
    block_size = rng.choice((1, 4, 16, 256))
    num_blocks = {1: 1760, 4: 440, 16: 116, 256: 14}[block_size]
    host_tier = rng.choice(((), ("--host-cache-memory", "4MiB")))
    return (
        *("--transport", transport, "--block-size", str(block_size), "--kv-blocks", str(num_blocks), *host_tier),
        *("--chunk-tokens", rng.choice(("16", "64", "512")), "--max-seqs", rng.choice(("4", "16", "64"))),
        *("--local-prefill-tokens", rng.choice(("0", "50"))),
    )


def ask(client: Client, options: Mapping[str, Any], **more: Any) -> Completion:
    text = options.get("prompt")
    others = {name: value for name, value in options.items() if name != "prompt"}
    return client.complete(text, timeout_s=90, **(others | more))


def ask_all(client: Client, requests: Sequence[RandomRequest]) -> Answers:
    with ThreadPoolExecutor(CALLERS) as callers:
        completions = callers.map(lambda each: ask(client, each.options), requests)
        return {request.name: completion for request, completion in zip(requests, completions, strict=True)}


def exact_parts(completion: Completion) -> list[tuple[object, ...]]:
    return [
        (each.index, each.token_ids, each.text, each.finish_reason, each.matched_stop) for each in completion.choices
    ]


def near_parts(completion: Completion) -> list[float]:
    """Alternatives by rank: near ones may change places."""

    def values(logprobs: Sequence[TokenLogprobs]) -> list[float]:
        return [value for each in logprobs for value in (each.logprob, *[logprob for _, logprob in each.top])]

    scores = [each.score for each in completion.choices if each.score is not None]
    return sum([values(each.logprobs) for each in completion.choices], [*scores, *values(completion.prompt_logprobs)])


def assert_same(answers: Answers, right: Answers) -> None:
    for name, completion in answers.items():
        assert exact_parts(completion) == exact_parts(right[name]), name
        assert near_parts(completion) == pytest.approx(near_parts(right[name]), rel=1e-4, abs=LOGPROB_TOLERANCE), name


@pytest.fixture(scope="module")
def requests() -> tuple[RandomRequest, ...]:
    return make_sharing_requests(NUM_REQUESTS, SEED)


@pytest.fixture(scope="module")
def right(requests: tuple[RandomRequest, ...]) -> Answers:
    with serve("demo", "--no-prefix-cache", *COMMON) as cluster, Client(cluster.target) as client:
        client.wait_ready(60)
        answers = ask_all(client, requests)
    assert all(each.usage.cached_tokens == 0 for each in answers.values())
    return answers


@pytest.fixture(scope="module", params=["shm", "tcp"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    options = draw_cluster(request.param)
    print("tandem serve", *options)
    with serve("demo", *COMMON, *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(60)
        yield client
        assert becomes_idle(client, 15), client.status()


def test_what_is_shared_changes_no_answer(client: Client, requests: tuple[RandomRequest, ...], right: Answers) -> None:
    for _ in range(2):
        answers = ask_all(client, requests)
        assert_same(answers, right)
    assert any(each.usage.cached_tokens for each in answers.values())


def test_callers_who_leave_at_any_moment_change_nothing(
    client: Client, requests: tuple[RandomRequest, ...], right: Answers
) -> None:
    rng = Random(SEED)

    def leave(request: RandomRequest) -> None:
        options = dict(request.options) | {"request_id": "", "timeout_s": rng.choice((0.005, 0.02, 0.05, 0.2))}
        text = options.pop("prompt", None)
        try:
            client.complete(text, **options)
        except TandemError:
            return

    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(leave, requests))
    assert becomes_idle(client, 15), client.status()
    assert_same(ask_all(client, requests[:10]), right)


def test_no_salt_finds_what_another_one_computed(client: Client) -> None:
    prompt = [Random(SEED).randrange(4, 600) for _ in range(520)]
    forms: list[dict[str, Any]] = [{"n": 2, "seed": 1}, {"beam_width": 2, "n": 2}, {"regex": "[a-z]{9}"}]
    for number, form in enumerate(forms):
        for salt in (f"one {number}", f"other {number}"):
            options = {"token_ids": prompt, "max_tokens": 20, "cache_salt": salt} | form
            assert ask(client, options).usage.cached_tokens == 0
            assert ask(client, options).usage.cached_tokens > 0


def test_with_workers_killed_in_the_middle_nothing_changes(requests: tuple[RandomRequest, ...], right: Answers) -> None:
    rng = Random(SEED)
    with serve("demo", "--prefill", "2", "--decode", "2", *COMMON) as cluster, Client(cluster.target) as client:
        client.wait_ready(60)
        assert eventually(lambda: len(client.status().workers) == 4, 60)
        for role in (Role.PREFILL, Role.DECODE):
            with ThreadPoolExecutor(1) as asking:
                running = asking.submit(ask_all, client, requests)
                time.sleep(rng.uniform(0.2, 0.8))
                victims = [each.info.pid for each in client.status().workers if each.info.role is role]
                os.kill(rng.choice(victims), signal.SIGKILL)
                assert_same(running.result(90), right)
            assert eventually(lambda: len(client.status().workers) == 4, 60)
        assert becomes_idle(client, 15), client.status()


# --- beams that follow a grammar, against transformers ---


def allowed(language: Language, text: str, num_prompt_tokens: int) -> Callable[[int, torch.Tensor], list[int]]:
    info = read_checkpoint(DEMO)
    start = GrammarCompiler.of(info).compile(Constraint(language, (text,)))

    def may_follow(_: int, token_ids: torch.Tensor) -> list[int]:
        matcher = start.deep_copy()
        output = token_ids.tolist()[num_prompt_tokens:]
        if not matcher.consume_tokens(output):
            return [0]  # behind its end, or out of the running: it goes nowhere
        mask = matcher.compute_bitmask()
        return [each for each in range(info.vocab_size) if mask[each // 8] >> each % 8 & 1]

    return may_follow


@cache
def model() -> Any:
    return load_transformers(resolve_model(DEMO), torch.float32)


@cache
def found_by_transformers(
    beam_width: int, language: Language, text: str, prompt: tuple[int, ...]
) -> tuple[list[list[int]], list[float]]:
    """Completions, up to the token that ends them, and scores; once for all ways of serving."""
    out = model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=beam_width,
        num_return_sequences=beam_width,
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=1,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allowed(language, text, len(prompt)),
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = [each[: each.index(1) + 1] if 1 in each else each for each in out.sequences[:, len(prompt) :].tolist()]
    return ids, out.sequences_scores.tolist()


@pytest.mark.parametrize("beam_width", [2, 3, 4])
@pytest.mark.parametrize(
    ("language", "text"),
    [(Language.REGEX, "[A-Z][a-z ]{10,60}\\."), (Language.GRAMMAR, 'start: ("a".."z" | " ")+ "!"')],
)
def test_beams_find_within_a_grammar_what_transformers_finds(
    client: Client, beam_width: int, language: Language, text: str
) -> None:
    prompt = tuple(Random(3).randrange(4, 600) for _ in range(70))
    ids, scores = found_by_transformers(beam_width, language, text, prompt)

    options = {"token_ids": prompt, "max_tokens": 40, "beam_width": beam_width, "n": beam_width, language: text}
    for _ in range(2):
        choices = ask(client, options).choices
        assert [list(each.token_ids) for each in choices] == ids
        assert [each.score for each in choices] == pytest.approx(scores, rel=1e-4)
    assert {each.finish_reason for each in choices} <= {FinishReason.STOP, FinishReason.LENGTH}
