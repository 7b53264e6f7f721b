"""Callers that never pause and check every token: whatever happens to the cluster, nothing may be lost.

Each request is one of a few, half of them sampled with a seed, whose tokens were learned while nothing
happened. A request that fails, misses a token or brings another one is counted as what it is.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Unpack

from models.demo.text import make_story
from shell.clock import MonotonicClock
from tandem.client import AsyncClient, GenerateOptions, GenerationUpdate
from tandem.errors import TandemError
from tandem.types import TokenId

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request and the tokens that are its answer."""

    prompt: str
    temperature: float
    seed: int
    answer: tuple[TokenId, ...] = ()


class Asker(Protocol):
    """What a caller needs of `tandem.client.AsyncClient`."""

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Streams what follows the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Sighting:
    """What became of one request."""

    phase: str
    """The phase in which it ended."""
    error: str
    """Empty if none; `tokens differ` if it ended well with another answer."""
    num_tokens: int
    ttft_s: float
    longest_gap_s: float
    """Between two messages of its stream."""


@dataclass(frozen=True, slots=True)
class Account:
    """All requests that ended in one phase."""

    phase: str
    requests: int
    failed: int
    wrong: int
    tokens: int
    ttft_p50_ms: float
    ttft_max_ms: float
    gap_p50_ms: float
    """Median of the requests' longest gaps."""
    gap_max_ms: float


class Witness:
    """`callers` requests under way at any time, through one client of all routers."""

    def __init__(self, target: str, callers: int, max_tokens: int, num_questions: int = 8) -> None:
        self._target = target
        self._callers = callers
        self._max_tokens = max_tokens
        self._questions = [_question(index) for index in range(num_questions)]
        self._clock = MonotonicClock()
        self._sightings: list[Sighting] = []
        self._news = asyncio.Event()
        self.phase = "start"

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Witness]:
        """Learns the answers, then calls without pause until the block ends; then lets the last ones end."""
        async with AsyncClient(self._target) as client:
            learning = asyncio.Semaphore(self._callers)  # no busier than what follows
            self._questions = list(
                await asyncio.gather(*(self._learn(client, learning, question) for question in self._questions))
            )
            turns = itertools.cycle(self._questions)
            going = asyncio.Event()
            going.set()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._callers):
                    tasks.create_task(self._call(client, turns, going))
                try:
                    yield self
                finally:
                    going.clear()

    async def see(self, count: int) -> None:
        """Returns when `count` further requests have ended."""
        wanted = len(self._sightings) + count
        while len(self._sightings) < wanted:
            self._news.clear()
            await self._news.wait()

    @property
    def sightings(self) -> Sequence[Sighting]:
        """All so far."""
        return self._sightings

    def accounts(self) -> list[Account]:
        """One per phase in which a request ended, in order."""
        phases = dict.fromkeys(each.phase for each in self._sightings)
        return [_account(phase, [each for each in self._sightings if each.phase == phase]) for phase in phases]

    async def _learn(self, client: AsyncClient, learning: asyncio.Semaphore, question: Question) -> Question:
        async with learning:
            done = await client.complete(question.prompt, timeout_s=REQUEST_TIMEOUT_S, **self._options(question))
        return Question(question.prompt, question.temperature, question.seed, done.choices[0].token_ids)

    def _options(self, question: Question) -> GenerateOptions:
        return GenerateOptions(
            max_tokens=self._max_tokens, temperature=question.temperature, seed=question.seed, ignore_eos=True
        )

    async def _call(self, client: AsyncClient, turns: Iterator[Question], going: asyncio.Event) -> None:
        while going.is_set():
            self._sightings.append(await self.ask(client, next(turns)))
            self._news.set()

    async def ask(self, client: Asker, question: Question) -> Sighting:
        """One request, seen to its end. Raises nothing but CancelledError."""
        begin_s = self._clock.now_s()
        arrivals: list[float] = []
        tokens: list[TokenId] = []
        error = ""
        updates = client.generate(question.prompt, timeout_s=REQUEST_TIMEOUT_S, **self._options(question))
        try:
            async with aclosing(updates):
                async for update in updates:
                    tokens += update.token_ids
                    arrivals.append(self._clock.now_s())
        except TandemError as failure:
            error = f"{failure.reason}: {failure.message}"
        if not error and tuple(tokens) != question.answer:
            error = "tokens differ"
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        ttft_s = arrivals[0] - begin_s if arrivals else 0.0
        return Sighting(self.phase, error, len(tokens), ttft_s, max(gaps, default=0.0))


def _question(index: int) -> Question:
    sampled = index % 2 == 1
    return Question(make_story(random.Random(index), 4).text, temperature=0.8 if sampled else 0.0, seed=index)


def _account(phase: str, seen: Sequence[Sighting]) -> Account:
    wrong = sum(each.error == "tokens differ" for each in seen)
    return Account(
        phase=phase,
        requests=len(seen),
        failed=sum(bool(each.error) for each in seen) - wrong,
        wrong=wrong,
        tokens=sum(each.num_tokens for each in seen),
        ttft_p50_ms=1e3 * statistics.median(each.ttft_s for each in seen),
        ttft_max_ms=1e3 * max(each.ttft_s for each in seen),
        gap_p50_ms=1e3 * statistics.median(each.longest_gap_s for each in seen),
        gap_max_ms=1e3 * max(each.longest_gap_s for each in seen),
    )
