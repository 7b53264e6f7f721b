"""Callers that never pause and check every token: whatever happens to the cluster, nothing may be lost.

Each request is one of a few, half of them sampled with a seed, whose tokens were learned while nothing happened. A
request that fails, misses a token or brings another one is counted as what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Unpack

from models.demo.text import make_story
from shell.clock import MonotonicClock
from tandem.client import AsyncClient, GenerateOptions, GenerationUpdate
from tandem.errors import TandemError
from tandem.types import TokenId

REQUEST_TIMEOUT_S = 120.0
DIFFERS = "tokens differ"
_READY_TIMEOUT_S = 60.0
_PAUSE_S = 1.0
"""Of a caller after a request that failed, unless it waits for SERVING."""
_VOCABULARY = range(4, 631)
"""Of the demo model, without its special tokens."""
_FIRST_SEED = 600
"""From here on no draw of `random_questions` lies within 8e-6 of the mass from another token's. A replayed stream
computes what it had generated as a prompt, whose sums may differ by 1e-6 from those of the steps.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """One request and the tokens that are its answer."""

    prompt: str | None
    options: GenerateOptions
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
    """What became of one request; times are of the monotonic clock."""

    phase: str
    """The phase in which it ended."""
    error: str
    """Empty if none; `DIFFERS` if it ended well with another answer."""
    is_wrong: bool
    """Whether a token came that is not the answer's, or a success has too few."""
    num_tokens: int
    sent_s: float
    ended_s: float
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


def story_questions(count: int, max_tokens: int) -> list[Question]:
    """Returns questions about stories of the demo model."""
    return [
        Question(
            make_story(random.Random(index), 4).text,
            GenerateOptions(max_tokens=max_tokens, temperature=index % 2 * 0.8, seed=index, ignore_eos=True),
        )
        for index in range(count)
    ]


def random_questions(count: int, prompt_tokens: int, max_tokens: int) -> list[Question]:
    """Returns prompts of random tokens, none of whose draws is near the border between two tokens."""
    return [
        Question(
            None,
            GenerateOptions(
                token_ids=random.Random(index).choices(_VOCABULARY, k=prompt_tokens),
                max_tokens=max_tokens,
                temperature=index % 2 * 0.8,
                seed=_FIRST_SEED + index,
                ignore_eos=True,
            ),
        )
        for index in range(count)
    ]


class Witness:
    """`callers` requests under way at any time, through one client of all routers."""

    def __init__(
        self,
        target: str,
        callers: int,
        questions: Sequence[Question],
        *,
        waits_until_ready: bool = False,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """`waits_until_ready`: after a failure a caller waits for SERVING; otherwise it pauses for a second."""
        self._target = target
        self._callers = callers
        self._questions = list(questions)
        self._waits_until_ready = waits_until_ready
        self._timeout_s = timeout_s
        self._clock = MonotonicClock()
        self._news = asyncio.Event()
        self.sightings: list[Sighting] = []
        self.phase = "start"

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Witness]:
        """Learns the answers once, then calls without pause until the block ends; then the last requests end."""
        async with AsyncClient(self._target) as client:
            learning = asyncio.Semaphore(self._callers)  # no busier than what follows
            self._questions = list(await asyncio.gather(*(self._learn(client, learning, q) for q in self._questions)))
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
        """Returns when `count` further requests have ended. Raises TimeoutError if none ends for twice its deadline."""
        wanted = len(self.sightings) + count
        while len(self.sightings) < wanted:
            self._news.clear()
            async with asyncio.timeout(2 * self._timeout_s + _READY_TIMEOUT_S):
                await self._news.wait()

    def accounts(self) -> list[Account]:
        """One per phase in which a request ended, in order."""
        phases = dict.fromkeys(each.phase for each in self.sightings)
        return [_account(phase, [each for each in self.sightings if each.phase == phase]) for phase in phases]

    async def ask(self, client: Asker, question: Question) -> Sighting:
        """One request, seen to its end. Raises nothing but CancelledError."""
        sent_s = self._clock.now_s()
        arrivals: list[float] = []
        tokens: list[TokenId] = []
        error = ""
        updates = client.generate(question.prompt, timeout_s=self._timeout_s, **question.options)
        try:
            async with aclosing(updates):
                async for update in updates:
                    tokens += update.token_ids
                    arrivals.append(self._clock.now_s())
        except TandemError as failure:
            error = f"{failure.reason}: {failure.message}"
        is_wrong = tuple(tokens) != (question.answer[: len(tokens)] if error else question.answer)
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        return Sighting(
            self.phase,
            error or (DIFFERS if is_wrong else ""),
            is_wrong,
            len(tokens),
            sent_s,
            self._clock.now_s(),
            arrivals[0] - sent_s if arrivals else 0.0,
            max(gaps, default=0.0),
        )

    async def _learn(self, client: AsyncClient, learning: asyncio.Semaphore, question: Question) -> Question:
        if question.answer:
            return question
        async with learning:
            done = await client.complete(question.prompt, timeout_s=self._timeout_s, **question.options)
        return replace(question, answer=done.choices[0].token_ids)

    async def _call(self, client: AsyncClient, turns: Iterator[Question], going: asyncio.Event) -> None:
        while going.is_set():
            seen = await self.ask(client, next(turns))
            self.sightings.append(seen)
            self._news.set()
            if seen.error and not self._waits_until_ready:
                await asyncio.sleep(_PAUSE_S)
            elif seen.error:
                with contextlib.suppress(TandemError):  # the next request says what is wrong
                    await client.wait_ready(_READY_TIMEOUT_S)


def _account(phase: str, seen: Sequence[Sighting]) -> Account:
    wrong = sum(each.is_wrong for each in seen)
    return Account(
        phase=phase,
        requests=len(seen),
        failed=sum(bool(each.error) and not each.is_wrong for each in seen),
        wrong=wrong,
        tokens=sum(each.num_tokens for each in seen),
        ttft_p50_ms=1e3 * statistics.median(each.ttft_s for each in seen),
        ttft_max_ms=1e3 * max(each.ttft_s for each in seen),
        gap_p50_ms=1e3 * statistics.median(each.longest_gap_s for each in seen),
        gap_max_ms=1e3 * max(each.longest_gap_s for each in seen),
    )
