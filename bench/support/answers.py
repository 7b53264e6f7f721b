"""What a cluster answers to random requests: all that must be equal between two checkouts, as JSON values."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.support.random_requests import RandomRequest
from tandem.client import AsyncClient, Choice, GenerationUpdate
from tandem.errors import TandemError
from tandem.types import TokenLogprobs

CONCURRENCY = 16
READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 1800.0
"""Longer than a whole run on a busy machine: a request of low priority waits in the small pool for most others."""
_LOGPROB_DIGITS = 4

Answer = dict[str, Any]
Answers = dict[str, Answer]
"""By request name."""


async def ask_cluster(target: str, requests: Sequence[RandomRequest]) -> tuple[Answers, int]:
    """Answers by request name, and how often the cluster preempted."""
    answers: Answers = {}
    left = deque(requests)
    async with AsyncClient(target) as client:
        await client.wait_ready(timeout_s=READY_TIMEOUT_S)

        async def caller() -> None:
            while left:
                request = left.popleft()
                answers[request.name] = await _ask(client, request)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENCY):
                tasks.create_task(caller())
        status = await client.status()
    return answers, sum(worker.load.preemptions for worker in status.workers)


async def _ask(client: AsyncClient, request: RandomRequest) -> Answer:
    """A refusal is an answer too."""
    options = dict(request.options)
    prompt = options.pop("prompt", None)
    try:
        if not request.streams:
            done = await client.complete(prompt, timeout_s=REQUEST_TIMEOUT_S, **options)
            return _answer(done.choices, done.usage.prompt_tokens)
        updates = [each async for each in client.generate(prompt, timeout_s=REQUEST_TIMEOUT_S, **options)]
    except TandemError as error:
        return {"error": error.reason.value}
    usage = updates[-1].usage
    return _answer(updates, None if usage is None else usage.prompt_tokens)


def _answer(parts: Sequence[GenerationUpdate | Choice], num_prompt_tokens: int | None) -> Answer:
    answer: Answer = {
        "token_ids": [token_id for part in parts for token_id in part.token_ids],
        "text": "".join(part.text for part in parts),
        "finish_reason": parts[-1].finish_reason,
        "matched_stop": parts[-1].matched_stop,
        "num_prompt_tokens": num_prompt_tokens,
    }
    logprobs = [_rounded(each) for part in parts for each in part.logprobs]
    return answer | {"logprobs": logprobs} if logprobs else answer


def _rounded(each: TokenLogprobs) -> list[Any]:
    """[id, log-probability, [[id, log-probability], …]]."""
    top = [[token_id, round(value, _LOGPROB_DIGITS)] for token_id, value in each.top]
    return [each.token_id, round(each.logprob, _LOGPROB_DIGITS), top]
