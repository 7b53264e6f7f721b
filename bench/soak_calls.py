"""What callers of a soak do and hear: requests of every kind, ways to behave badly, and the verdict on each call.

Knows neither processes nor faults. Every kind of request has one right answer, learned in a quiet run; a call that
failed or was left early must have heard the beginning of it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol, Unpack

from bench.random_requests import RandomRequest, make_requests, make_sharing_requests
from tandem.client import Choice, Completion, GenerateOptions, GenerationUpdate
from tandem.clock import Clock
from tandem.errors import Reason, TandemError

DEADLINE_S = 20.0
LONGEST_S = 60.0
"""Most that a call without a deadline may take."""
OVERRUN_S = 1.0
"""Most that a call may take beyond that."""
_SHARE_WITH_CHOICES = 0.15
_SLOW_S = 0.2
_SLOW_UPDATES = 15
"""A slow reader pauses so long before each of so many updates."""
_EXPLAINED = {
    *(Reason.NO_CAPABLE_WORKER, Reason.WORKER_LOST, Reason.DRAINING, Reason.DEADLINE_EXCEEDED, Reason.QUEUE_FULL),
    *(Reason.TRANSFER_FAILED, Reason.PEER_LOST),
}
"""What a caller may be told while processes die and stand still. Anything else is a bug."""
CONNECTION_LOST = "connection lost"
"""Outcome of a call that no router answered: its connection was reset, or the router is not there."""
_MADE_BY_GRPC = ("UNAVAILABLE: ", "CANCELLED: ")
"""How messages of such errors begin; the router's own do not."""


class Manner(enum.StrEnum):
    """How a caller behaves."""

    PLAIN = "plain"
    PATIENT = "no deadline"
    SLOW = "slow reader"
    CANCELS = "cancels"
    HURRIED = "tiny deadline"


WANTS_ANSWER = (Manner.PLAIN, Manner.PATIENT, Manner.SLOW)
"""Those of which the share that was served is told."""
_WEIGHTS = {Manner.PLAIN: 12, Manner.PATIENT: 2, Manner.SLOW: 1, Manner.CANCELS: 3, Manner.HURRIED: 2}


@dataclass(frozen=True, slots=True)
class Said:
    """What one choice said so far."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    """Empty: it has not ended."""

    def begins(self, other: Said) -> bool:
        """Whether this is the beginning of the other, or all of it."""
        if self.finish_reason:
            return self == other
        return other.token_ids[: len(self.token_ids)] == self.token_ids and other.text.startswith(self.text)


Answer = Mapping[int, Said]
"""By choice."""


class Client(Protocol):
    """What a caller needs of `tandem.client.AsyncClient`."""

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Streams what follows the prompt."""
        ...

    async def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Everything at once."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A request and its right answer."""

    request: RandomRequest
    answer: Answer


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one call."""

    kind: str
    manner: Manner
    outcome: str
    """`ok`, `left` by its caller, `hung`, `connection lost`, or the reason that the router gave."""
    complaint: str = ""
    """What is wrong with that, in words; empty = nothing."""


def draw_requests(count: int, seed: int) -> list[RandomRequest]:
    """Requests over every parameter: every other one shares; of the rest, some want several choices."""
    rng = Random(seed)
    plain = [
        replace(each, options=each.options | {"n": rng.randint(2, 3)}) if rng.random() < _SHARE_WITH_CHOICES else each
        for each in make_requests(count, seed)
    ]
    sharing = make_sharing_requests(count, seed)
    return [(sharing if index % 2 else plain)[index] for index in range(count)]


def draw_manner(rng: Random) -> Manner:
    """Most callers are plain."""
    (manner,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return manner


async def learn(client: Client, requests: Sequence[RandomRequest]) -> list[Kind]:
    """Every answer, one after the other. Raises TandemError if one is refused or fails."""
    kinds = []
    for request in requests:
        heard: dict[int, Said] = {}
        await listen(client, request, heard, DEADLINE_S, 0.0)
        kinds.append(Kind(request, heard))
    return kinds


async def call(client: Client, kind: Kind, manner: Manner, rng: Random, clock: Clock) -> Ended:
    """One call to its end. Raises nothing but CancelledError."""
    deadline_s = {Manner.PATIENT: None, Manner.HURRIED: rng.uniform(0.001, 0.2)}.get(manner, DEADLINE_S)
    limit_s = LONGEST_S if deadline_s is None else deadline_s
    heard: dict[int, Said] = {}
    begin_s = clock.now_s()
    outcome, complaint = "ok", ""
    try:
        async with asyncio.timeout(limit_s + OVERRUN_S):
            listening = listen(client, kind.request, heard, deadline_s, _SLOW_S if manner is Manner.SLOW else 0.0)
            if manner is Manner.CANCELS:
                outcome = await _leave_early(listening, rng.uniform(0.0, 0.4))
            else:
                await listening
    except TimeoutError:
        outcome, complaint = "hung", f"no end {OVERRUN_S:g} s after its limit of {limit_s:.3f} s"
    except TandemError as error:
        outcome = CONNECTION_LOST if error.message.startswith(_MADE_BY_GRPC) else error.reason.value
        if error.reason not in _EXPLAINED:
            complaint = f"unexplained error: {error.reason}: {error.message}"
    complaint = complaint or wrong(heard, kind.answer, succeeded=outcome == "ok")
    if complaint:
        complaint += f" (after {clock.now_s() - begin_s:.3f} s)"
    return Ended(kind.request.name, manner, outcome, complaint)


async def _leave_early(listening: Coroutine[None, None, None], after_s: float) -> str:
    """Cancels the call, unless it has ended by then. Returns the outcome."""
    try:
        async with asyncio.timeout(after_s):
            await listening
    except TimeoutError:
        return "left"
    return "ok"


def wrong(heard: Answer, expected: Answer, *, succeeded: bool) -> str:
    """What differs, in words; empty = nothing."""
    if succeeded and heard.keys() != expected.keys():
        return f"choices {sorted(heard)} instead of {sorted(expected)}"
    for index, said in heard.items():
        if index not in expected:
            return f"choice {index} was not asked for"
        if not (said == expected[index] if succeeded else said.begins(expected[index])):
            return f"choice {index} differs: {said} instead of {expected[index]}"
    return ""


async def listen(
    client: Client, request: RandomRequest, heard: dict[int, Said], timeout_s: float | None, pause_s: float
) -> None:
    """Puts what it hears into `heard`, message by message."""
    options = dict(request.options)
    prompt = options.pop("prompt", None)
    if not (request.streams or pause_s):
        _add(heard, (await client.complete(prompt, timeout_s=timeout_s, **options)).choices)
        return
    pauses_left = _SLOW_UPDATES if pause_s else 0
    async with aclosing(client.generate(prompt, timeout_s=timeout_s, **options)) as updates:
        async for update in updates:
            _add(heard, (update,))
            if pauses_left:
                pauses_left -= 1
                await asyncio.sleep(pause_s)


def _add(heard: dict[int, Said], parts: Iterable[GenerationUpdate | Choice]) -> None:
    for part in parts:
        before = heard.get(part.index, Said())
        heard[part.index] = Said(
            before.token_ids + tuple(part.token_ids),
            before.text + part.text,
            "" if part.finish_reason is None else part.finish_reason.value,
        )
