"""What callers of a soak do and hear: requests of every kind, ways to behave badly, and the verdict on each call.

Knows neither processes nor faults. Every kind of request has one right answer of each model, learned in quiet runs; a
model is a set of weights with a layout of KV. An answer must be one of these whole. What a call heard that failed or
was left early must be the beginning of one.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random
from typing import Any, Protocol, Unpack

from bench.support.random_requests import VOCAB_SIZE, RandomRequest, make_requests, make_sharing_requests
from shell.clock import Clock
from tandem.client import Choice, Completion, GenerateOptions, GenerationUpdate
from tandem.errors import Reason, TandemError

DEADLINE_S = 20.0
LONGEST_S = 60.0
"""Most that a call without a deadline may take."""
OVERRUN_S = 1.0
"""Most that a call may take beyond that."""
_SHARE_WITH_CHOICES = 0.15
_SHARE_LONG = 0.3
_LONG_TOKENS = (300, 900)
"""Of such answers, whose workers end while they stream."""
_TOLD_TOKENS = 6
"""Of an answer that differs, from there on."""
_SLOW_S = 0.2
_SLOW_UPDATES = 15
"""A slow reader pauses so long before each of so many updates."""
MODEL_CHANGED = "MODEL_CHANGED"
"""Reason of a refusal: the workers that can end the answer as it began are gone. Callers send the request again."""
_EXPLAINED: set[str] = {
    MODEL_CHANGED,
    *(Reason.NO_CAPABLE_WORKER, Reason.WORKER_LOST, Reason.DRAINING, Reason.DEADLINE_EXCEEDED, Reason.QUEUE_FULL),
    *(Reason.TRANSFER_FAILED, Reason.PEER_LOST),
}
"""What a caller may be told while processes die and stand still. Anything else is a bug."""
CONNECTION_LOST = "connection lost"
"""Outcome of a call that no router answered: its connection was reset, or the router is not there."""
_LATE_S = 0.5
STOOD_STILL = "checker stood still"
"""Outcome of a call whose limit this process itself noticed too late to say whether the call has ended in time."""
NOT_COUNTED = (CONNECTION_LOST, MODEL_CHANGED, STOOD_STILL)
"""Outcomes of calls that are not in the share served."""
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

    def told_from(self, place: int) -> str:
        """Returns a few tokens from `place` on, and the lengths of the answer."""
        tokens = self.token_ids[place : place + _TOLD_TOKENS]
        return (
            f"{tokens} of {len(self.token_ids)} tokens and {len(self.text)} letters, {self.finish_reason or 'no end'}"
        )


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
    """A request and its right answers."""

    request: RandomRequest
    answers: Mapping[str, Answer]
    """By model."""

    @property
    def answer(self) -> Answer:
        """The right one, where there is one model."""
        (answer,) = self.answers.values()
        return answer


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one call."""

    kind: str
    manner: Manner
    outcome: str
    """`ok`, `left` by its caller, `hung`, `connection lost`, or the reason that the router gave."""
    complaint: str = ""
    """What is wrong with that, in words that begin with its sort and a colon; empty = nothing."""
    num_tokens: int = 0
    """That were heard, and compared."""


def draw_requests(count: int, seed: int) -> list[RandomRequest]:
    """Requests over every parameter: every other one shares; some others want several choices, or a long answer."""
    rng = Random(seed)
    plain = [replace(each, options=_varied(each.options, rng)) for each in make_requests(count, seed)]
    sharing = make_sharing_requests(count, seed)
    return [(sharing if index % 2 else plain)[index] for index in range(count)]


def _varied(options: dict[str, Any], rng: Random) -> dict[str, Any]:
    """The options of a plain request; of some with choices, of others with a short prompt and a long answer."""
    drawn = rng.random()
    if drawn < _SHARE_WITH_CHOICES:
        return options | {"n": rng.randint(2, 3)}
    if drawn < _SHARE_WITH_CHOICES + _SHARE_LONG:
        tokens, prompt = rng.randint(*_LONG_TOKENS), [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 100))]
        kept = {name: each for name, each in options.items() if name not in ("prompt", "messages")}
        return kept | {"token_ids": prompt, "max_tokens": tokens, "min_tokens": tokens}
    return options


def draw_manner(rng: Random) -> Manner:
    """Most callers are plain."""
    (manner,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return manner


async def learn(client: Client, requests: Sequence[RandomRequest], model: str = "") -> list[Kind]:
    """Every answer of the model that is served, one after the other. Raises TandemError if one is refused or fails."""
    kinds = []
    for request in requests:
        heard: dict[int, Said] = {}
        await listen(client, request, heard, DEADLINE_S, 0.0)
        kinds.append(Kind(request, {model: heard}))
    return kinds


def merged(*learned: Sequence[Kind]) -> list[Kind]:
    """The same requests with the answers of several models."""
    return [
        Kind(same[0].request, {model: answer for each in same for model, answer in each.answers.items()})
        for same in zip(*learned, strict=True)
    ]


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
        late_s = clock.now_s() - begin_s - limit_s - OVERRUN_S
        if late_s > _LATE_S:
            outcome = STOOD_STILL
        else:
            outcome, complaint = "hung", f"hang: no end {OVERRUN_S:g} s after its limit of {limit_s:.3f} s"
    except TandemError as error:
        outcome = CONNECTION_LOST if error.message.startswith(_MADE_BY_GRPC) else str(error.reason)
        if error.reason not in _EXPLAINED:
            complaint = f"error: unexplained: {error.reason}: {error.message}"
    complaint = complaint or wrong(heard, kind.answers, succeeded=outcome == "ok")
    if complaint:
        complaint += f" (after {clock.now_s() - begin_s:.3f} s)"
    return Ended(kind.request.name, manner, outcome, complaint, sum(len(said.token_ids) for said in heard.values()))


async def _leave_early(listening: Coroutine[None, None, None], after_s: float) -> str:
    """Cancels the call, unless it has ended by then. Returns the outcome."""
    try:
        async with asyncio.timeout(after_s):
            await listening
    except TimeoutError:
        return "left"
    return "ok"


def wrong(heard: Answer, answers: Mapping[str, Answer], *, succeeded: bool) -> str:
    """What differs from every model's answer, in words, told of the nearest; empty = it is one of them.

    `mixed` if each choice begins as that of some model, else `wrong`.
    """
    found = {model: _difference(heard, answer, succeeded=succeeded) for model, answer in answers.items()}
    if not all(found.values()):
        return ""
    nearest = max(answers, key=lambda model: _num_alike(heard, answers[model]))
    is_mixed = len(answers) > 1 and all(
        any(_begins_alike(said, answer.get(index)) for answer in answers.values()) for index, said in heard.items()
    )
    alike = f"{_num_alike(heard, answers[nearest])} tokens are those of {nearest or 'the model'}"
    return f"{'mixed' if is_mixed else 'wrong'}: {alike}, then {found[nearest]}"


def _difference(heard: Answer, expected: Answer, *, succeeded: bool) -> str:
    if succeeded and heard.keys() != expected.keys():
        return f"choices {sorted(heard)} instead of {sorted(expected)}"
    for index, said in heard.items():
        if index not in expected:
            return f"choice {index} was not asked for"
        if not (said == expected[index] if succeeded else said.begins(expected[index])):
            place = _common(said, expected[index])
            return f"choice {index} differs: {said.told_from(place)} instead of {expected[index].told_from(place)}"
    return ""


def _num_alike(heard: Answer, expected: Answer) -> int:
    return sum(_common(said, expected[index]) for index, said in heard.items() if index in expected)


def _begins_alike(said: Said, expected: Said | None) -> bool:
    return expected is not None and said.token_ids[:1] == expected.token_ids[: len(said.token_ids[:1])]


def _common(said: Said, expected: Said) -> int:
    pairs = zip(said.token_ids, expected.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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
