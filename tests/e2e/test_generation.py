"""Right answers through three real processes, on the demo model."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.support.cluster import eventually
from models.demo.text import Story
from models.files.checkpoint import resolve_model
from shell.telemetry.metric import Process
from tandem.client import Client
from tandem.types import FinishReason
from tests.scraped import counted, expositions


@pytest.fixture(scope="module")
def reference() -> AutoModelForCausalLM:
    """The demo model in transformers."""
    return AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32)


def greedy_reference(model: AutoModelForCausalLM, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def test_every_fact_of_a_story_is_found_again(client: Client, story: Story) -> None:
    def handed_over() -> float:
        return counted(expositions(client)[Process.PREFILL], "tandem_transfers_total", outcome="committed")

    before = handed_over()
    answers = [
        client.complete(
            messages=[{"role": "user", "content": f"{story.text}\n{fact.question}"}],
            temperature=0.0,
            cache_salt=fact.question,
        )
        for fact in story.facts
    ]

    assert [answer.text for answer in answers] == [fact.sentence for fact in story.facts]
    assert all(answer.choices[0].finish_reason is FinishReason.STOP for answer in answers)
    # Each was handed over. Its prefill worker may say so after the last token.
    assert eventually(lambda: handed_over() - before == len(answers))


def test_sixteen_ragged_prompts_at_once_bring_the_reference_tokens(
    client: Client, reference: AutoModelForCausalLM
) -> None:
    rng = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 500, 511, 512, 513]
    prompts = [tuple(rng.randrange(4, 600) for _ in range(length)) for length in lengths]

    with ThreadPoolExecutor(len(prompts)) as callers:
        done = list(
            callers.map(
                lambda prompt: client.complete(token_ids=prompt, max_tokens=48, temperature=0.0, ignore_eos=True),
                prompts,
            )
        )

    for prompt, completion in zip(prompts, done, strict=True):
        assert list(completion.choices[0].token_ids) == greedy_reference(reference, prompt, 48), len(prompt)


def test_the_same_seed_brings_the_same_tokens_alone_and_in_a_crowd(client: Client, story: Story) -> None:
    def once(seed: int) -> tuple[int, ...]:
        done = client.complete(story.text, max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True)
        return done.choices[0].token_ids

    alone = [once(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as callers:
        crowd = list(callers.map(once, range(8)))

    assert crowd == alone
    assert len(set(alone)) == 8


def test_a_stream_and_a_complete_call_bring_the_same(client: Client, story: Story) -> None:
    options = {"max_tokens": 50, "temperature": 0.8, "seed": 3, "logprobs": 2}

    updates = list(client.generate(story.text, **options))
    done = client.complete(story.text, **options).choices[0]

    assert "".join(update.text for update in updates) == done.text
    assert tuple(token for update in updates for token in update.token_ids) == done.token_ids
    assert tuple(each for update in updates for each in update.logprobs) == done.logprobs
    assert [update.finish_reason for update in updates[:-1]] == [None] * (len(updates) - 1)


def test_a_stop_string_that_straddles_tokens_ends_the_text_before_it(client: Client, story: Story) -> None:
    whole = client.complete(story.text, max_tokens=40, temperature=0.0, ignore_eos=True).text
    stop = whole[7:12]

    kept = client.complete(story.text, max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop], include_stop=True)
    cut = client.complete(story.text, max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop])

    assert cut.text == whole[: whole.index(stop)]
    assert kept.text == cut.text + stop
    assert cut.choices[0].matched_stop == stop
    assert cut.choices[0].finish_reason is FinishReason.STOP


def test_a_short_request_sent_after_a_long_one_ends_first(client: Client, story: Story) -> None:
    begun, seen = threading.Event(), threading.Event()

    def long() -> None:
        """So many tokens that no machine is done with them before a short request."""
        with closing(client.generate("Once", max_tokens=1000, n=16, temperature=0.0, ignore_eos=True)) as updates:
            for _ in updates:
                begun.set()
                if seen.is_set():
                    return

    with ThreadPoolExecutor() as pool:
        other = pool.submit(long)
        try:
            assert begun.wait(30)
            client.complete(story.text, max_tokens=4, temperature=0.0, ignore_eos=True)
            assert not other.done()
        finally:
            seen.set()
        other.result()


@pytest.mark.parametrize("length", [1, 2, 64, 700])
def test_log_probabilities_of_a_prompt_are_those_of_transformers(
    client: Client, reference: AutoModelForCausalLM, length: int
) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(4, 600) for _ in range(length)]

    done = client.complete(token_ids=prompt, max_tokens=2, n=2, temperature=0.0, ignore_eos=True, prompt_logprobs=3)

    with torch.no_grad():
        rows = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [each.token_id for each in done.prompt_logprobs] == prompt[1:]
    for row, told in zip(rows, done.prompt_logprobs, strict=False):
        assert told.logprob == pytest.approx(float(row[told.token_id]), abs=1e-4)
        best = row.topk(3)
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert len(done.choices) == 2


def test_log_probabilities_of_a_prompt_stream_before_the_first_token_and_change_no_token(client: Client) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(4, 600) for _ in range(900)]
    options = {"token_ids": prompt, "max_tokens": 8, "temperature": 0.7, "seed": 3, "ignore_eos": True}

    plain = client.complete(**options).choices[0].token_ids  # its KV is known to both workers from now on
    updates = list(client.generate(**options, prompt_logprobs=20))

    told = [logprobs.token_id for each in updates for logprobs in each.prompt_logprobs]
    first = next(number for number, each in enumerate(updates) if each.token_ids)
    assert told == prompt[1:]
    assert not any(each.prompt_logprobs for each in updates[first:])
    assert tuple(token for each in updates for token in each.token_ids) == plain
