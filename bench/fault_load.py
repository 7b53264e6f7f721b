"""A fixed number of requests by a few clients, one after the other each, and what became of every one of them.

Knows neither processes nor faults. The tokens of each answer are compared with those of a quiet run, as far as they
came.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from bench.support.witness import Asker
from shell.clock import Clock, MonotonicClock
from tandem.client import AsyncClient, GenerateOptions
from tandem.errors import TandemError
from tandem.types import TokenId

REQUEST_TIMEOUT_S = 30.0
PAUSE_S = 1.0
"""After a request that failed."""
READY_TIMEOUT_S = 60.0
MOST_BETWEEN_ENDS_S = REQUEST_TIMEOUT_S + READY_TIMEOUT_S
"""As long as every client may wait for SERVING and then for its answer."""
_VOCABULARY = range(4, 631)
"""Of the demo model, without its special tokens."""
_FIRST_SEED = 600
"""From here on no draw of these questions lies within 8e-6 of the mass from another token's. A replayed stream computes
what it had generated as a prompt, whose sums may differ by 1e-6 from those of the steps: seed 13 met such a border.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """One request; every second one is sampled."""

    number: int
    prompt_tokens: int
    output_tokens: int

    @property
    def options(self) -> GenerateOptions:
        """All that makes its tokens what they are."""
        rng = random.Random(self.number)
        return GenerateOptions(
            token_ids=rng.choices(_VOCABULARY, k=self.prompt_tokens),
            max_tokens=self.output_tokens,
            temperature=self.number % 2 * 0.8,
            seed=_FIRST_SEED + self.number,
            ignore_eos=True,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """What became of one request; times on the monotonic clock."""

    sent_s: float
    ended_s: float
    error: str
    """The reason why it failed; empty = it succeeded."""
    is_wrong: bool
    """Whether a token came that is not that of the quiet run, or a success has too few."""

    @property
    def succeeded(self) -> bool:
        """Whether the caller got what it asked for."""
        return not self.error and not self.is_wrong


async def ask(client: Asker, question: Question, answer: Sequence[TokenId], clock: Clock) -> Call:
    """One request to its end."""
    sent_s = clock.now_s()
    tokens: list[TokenId] = []
    error = ""
    try:
        async with aclosing(client.generate(timeout_s=REQUEST_TIMEOUT_S, **question.options)) as updates:
            async for update in updates:
                tokens += update.token_ids
    except TandemError as failure:
        error = str(failure.reason)
    expected = answer[: len(tokens)] if error else answer
    return Call(sent_s, clock.now_s(), error, is_wrong=tuple(tokens) != tuple(expected))


class Load:
    """The clients. `calls` grows while `run` runs."""

    def __init__(self, target: str, clients: int, requests_each: int, questions: Sequence[Question]) -> None:
        self._target = target
        self._clients = clients
        self._requests_each = requests_each
        self._questions = questions
        self._clock = MonotonicClock()
        self._ended = asyncio.Event()
        self._answers: dict[int, tuple[TokenId, ...]] = {}
        self.calls: list[Call] = []

    async def learn(self) -> None:
        """Asks every question once, while nothing happens. Raises TandemError if one is not answered."""
        turns = asyncio.Semaphore(self._clients)  # no busier than the load

        async def learn_one(client: AsyncClient, question: Question) -> None:
            async with turns:
                done = await client.complete(timeout_s=REQUEST_TIMEOUT_S, **question.options)
            self._answers[question.number] = done.choices[0].token_ids

        async with AsyncClient(self._target) as client:
            await asyncio.gather(*(learn_one(client, question) for question in self._questions))

    async def run(self, *, waits_until_ready: bool) -> None:
        """Every request of every client. After a failure a client waits for SERVING, or pauses."""
        turns = itertools.cycle(self._questions)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._one_client(turns, waits_until_ready=waits_until_ready))

    async def ended(self, count: int) -> None:
        """Returns when so many requests have ended. Raises TimeoutError if for too long none does."""
        while len(self.calls) < count:
            self._ended.clear()
            async with asyncio.timeout(MOST_BETWEEN_ENDS_S):
                await self._ended.wait()

    async def _one_client(self, turns: Iterator[Question], *, waits_until_ready: bool) -> None:
        async with AsyncClient(self._target) as client:
            for _ in range(self._requests_each):
                question = next(turns)
                call = await ask(client, question, self._answers[question.number], self._clock)
                self.calls.append(call)
                self._ended.set()
                if call.error and waits_until_ready:
                    await client.wait_ready(READY_TIMEOUT_S)
                elif call.error:
                    await asyncio.sleep(PAUSE_S)
