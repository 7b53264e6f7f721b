"""One trial of `bench.goodput`: requests sent at their times, whatever became of the others, and what callers met."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.goodput_loads import Arrival, Load, arrivals
from bench.goodput_search import (
    ATTAINMENT,
    FAILED,
    ITL_FACTOR,
    TTFT_FACTOR,
    Objectives,
    Outcome,
    misses_allowed,
)
from bench.peers.process import PeerError
from bench.peers.streams import Prompt, StreamClient, fresh_prompts
from simulator.outcomes import quantile
from tandem.errors import TandemError

UNLOADED_LENGTHS_SEED = 1_000_000
"""Of the requests one at a time: all servers get the same lengths, or figures of few requests cannot be compared."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A load at a rate on one server."""

    rate_per_s: float
    requests: int
    objectives: Objectives
    outcomes: tuple[Outcome, ...]
    """Of those requests that ended, in the order of their ends; a trial that is lost may be left early."""
    client_cpu_share: float
    """Of one core: this process's time."""
    seconds: float
    pace: float = 1.0
    """Of the machine before or after it, whichever was slower; see `bench.pace`."""
    redone: int = 0
    """How often it was done before, on a machine that was too slow."""

    @property
    def attained(self) -> int:
        """Requests that ended and met both objectives."""
        return sum(each.attains(self.objectives) for each in self.outcomes)

    @property
    def missed(self) -> int:
        """Requests that ended and did not."""
        return len(self.outcomes) - self.attained

    @property
    def passed(self) -> bool:
        """Whether enough of all requests did."""
        return self.requests - self.attained <= misses_allowed(self.requests)

    def is_close(self, close: float) -> bool:
        """Whether it ended, and attained so much more than it must or less, or between these."""
        missed = self.requests - self.attained
        least = self.requests - math.floor(self.requests * (ATTAINMENT + close))
        return len(self.outcomes) == self.requests and least <= missed <= misses_allowed(self.requests, close)

    def and_then(self, more: Trial) -> Trial:
        """Both as one."""
        seconds = self.seconds + more.seconds
        client_s = self.client_cpu_share * self.seconds + more.client_cpu_share * more.seconds
        return replace(
            self,
            requests=self.requests + more.requests,
            outcomes=self.outcomes + more.outcomes,
            client_cpu_share=client_s / seconds,
            seconds=seconds,
            pace=min(self.pace, more.pace),
            redone=self.redone + more.redone,
        )

    def document(self) -> dict[str, Any]:
        """For the record; of a trial that was left early, `attainment` is that of the requests that ended."""
        good = [each for each in self.outcomes if not each.failed]
        return {
            "rate_per_s": self.rate_per_s,
            "requests": self.requests,
            "ended": len(self.outcomes),
            "attainment": self.attained / max(1, len(self.outcomes)),
            "passed": self.passed,
            "missed_first": sum(each.misses_first(self.objectives) for each in self.outcomes),
            "missed_between": sum(each.misses_between(self.objectives) for each in self.outcomes),
            "failed": len(self.outcomes) - len(good),
            "ttft_ms": _quantiles_ms([each.ttft_s for each in good]),
            "itl_ms": _quantiles_ms([each.itl_s for each in good]),
            "client_cpu_share": self.client_cpu_share,
            "seconds": self.seconds,
            "pace": self.pace,
            "redone": self.redone,
        }


@dataclass(slots=True)
class Unloaded:
    """One server, one request at a time."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    """The 95th percentile of each request's gaps."""
    gap_s: list[float] = field(default_factory=list)
    """All gaps."""
    pace: float = 1.0
    """Of the machine, `bench.pace`."""

    def document(self) -> dict[str, float]:
        """Medians and the pace, for the record."""
        found = {"ttft_ms": self.ttft_s, "itl_ms": self.itl_s, "gap_ms": self.gap_s}
        return {name: statistics.median(values) * 1e3 for name, values in found.items()} | {"pace": self.pace}


def objectives_of(unloaded: Sequence[Unloaded]) -> Objectives:
    """By the best server."""
    return Objectives(
        TTFT_FACTOR * min(statistics.median(each.ttft_s) for each in unloaded),
        ITL_FACTOR * min(statistics.median(each.itl_s) for each in unloaded),
    )


async def measure_unloaded(
    client: StreamClient, load: Load, count: int, vocab_size: int, seed: int, into: Unloaded
) -> None:
    """`count` of the load's own requests, one after the other; adds to `into`. `seed` makes the prompts' tokens."""
    requests = arrivals(load, 1.0, count, UNLOADED_LENGTHS_SEED)
    for request, prompt in zip(requests, _prompts(requests, vocab_size, seed), strict=True):
        stream = await client.generate(prompt, request.output_tokens)
        outcome = Outcome.of(stream.sent_s, [at_s for at_s, _ in stream.arrivals])
        into.gap_s += stream.gaps_s()
        into.ttft_s.append(outcome.ttft_s)
        into.itl_s.append(outcome.itl_s)


async def run_trial(
    client: StreamClient,
    requests: Sequence[Arrival],
    rate_per_s: float,
    objectives: Objectives,
    vocab_size: int,
    seed: int,
    misses_allowed: float = math.inf,
) -> Trial:
    """Sends `requests`, until more of them than are allowed have missed.

    Raises what the client raises if no request ends well. `seed` makes the prompts' tokens: another one for each
    trial, or a prefix cache knows them.
    """
    running = _Running(client, objectives, misses_allowed)
    prompts = _prompts(requests, vocab_size, seed)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    await running.send_all(requests, prompts)
    seconds = time.perf_counter() - began_s
    share = (time.process_time() - cpu_s) / seconds
    return Trial(rate_per_s, len(requests), objectives, tuple(running.outcomes), share, seconds)


class _Running:
    """The requests under way and the outcomes so far."""

    def __init__(self, client: StreamClient, objectives: Objectives, misses_allowed: float) -> None:
        self.outcomes: list[Outcome] = []
        self._client = client
        self._objectives = objectives
        self._misses_left = misses_allowed
        self._is_lost = asyncio.Event()
        self._error: Exception | None = None

    async def send_all(self, requests: Sequence[Arrival], prompts: Sequence[Prompt]) -> None:
        """Returns when all have ended, or the trial is lost."""
        sending = asyncio.create_task(self._open_loop(requests, prompts))
        lost = asyncio.create_task(self._is_lost.wait())
        try:
            await asyncio.wait((sending, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, lost):
                task.cancel()
            await asyncio.wait((sending, lost))
        if not sending.cancelled():
            sending.result()
        if self._error is not None and all(each.failed for each in self.outcomes):
            raise self._error

    async def _open_loop(self, requests: Sequence[Arrival], prompts: Sequence[Prompt]) -> None:
        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for request, prompt in zip(requests, prompts, strict=True):
                due_s = begin_s + request.at_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(self._one(prompt, request.output_tokens, due_s))

    async def _one(self, prompt: Prompt, output_tokens: int, due_s: float) -> None:
        try:
            stream = await self._client.generate(prompt, output_tokens)
        except (PeerError, TandemError) as error:
            self._error = error
            outcome = FAILED
        else:
            outcome = Outcome.of(due_s, [at_s for at_s, _ in stream.arrivals])
        self.outcomes.append(outcome)
        if not outcome.attains(self._objectives):
            self._misses_left -= 1
            if self._misses_left < 0:
                self._is_lost.set()


def _prompts(requests: Sequence[Arrival], vocab_size: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [fresh_prompts(rng, 1, request.prompt_tokens, vocab_size)[0] for request in requests]


def _quantiles_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    return {f"p{share:g}": quantile(sorted(values_s), share / 100) * 1e3 for share in (50, 90)}
