"""One try, with workers whose every word is spoken here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router.attempt import Attempt
from router.placement import Placement
from router.stream import TokenStream
from router.worker_link import SequenceListener
from tandem.clock import ManualClock
from tandem.errors import InternalError, Reason, TandemError, TransferError, Unavailable
from tandem.telemetry.observers import RequestStart
from tandem.types import (
    FinishReason,
    Handle,
    RequestId,
    Role,
    SamplingParams,
    SequenceSpec,
    TokenDelta,
    TokenId,
    WorkerInfo,
)
from tests.recording_observers import RecordedRequest

SILENCE_S = 0.01
"""On a clock that the tests move."""
SPEC = SequenceSpec(RequestId("r"), (TokenId(1),), 1, SamplingParams(max_tokens=3))


class SilentLink:
    """A stream to a worker that says only what the test says for it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_released = False

    def reserve(self, _: SequenceSpec, listener: SequenceListener, *, local_prefill: bool) -> Handle:
        assert not local_prefill
        return self._hear(listener)

    def prefill(self, _: SequenceSpec, listener: SequenceListener, ticket: bytes, kv_endpoint: bytes) -> Handle:
        assert (ticket, kv_endpoint) == (b"ticket", b"endpoint")
        return self._hear(listener)

    def release(self, _: Handle) -> None:
        self.is_released = True

    def _hear(self, listener: SequenceListener) -> Handle:
        self.says = listener
        self.asked.set()
        return Handle(1)


class Collector(TokenStream):
    """A sink."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens_in_order(self) -> int:
        return self.next_offset


class Pair:
    """One attempt on a pair of workers, under way."""

    def __init__(self, info: Callable[..., WorkerInfo], clock: ManualClock) -> None:
        self.infos = {role: info(role, role) for role in Role}
        self.prefill, self.decode = SilentLink(), SilentLink()
        self.steps: dict[Role, Iterator[int]] = {}
        """Of engines that move."""
        self.num_asked = 0
        placement = Placement(self.infos[Role.PREFILL], self.infos[Role.DECODE])
        sink: Any = Collector()
        observer = RecordedRequest(RequestStart("r", 1, 3, 0, "", 0.0))
        links: Any = self
        self.clock = clock
        self.attempt = Attempt(placement, links, sink, observer, clock, clock.now_s(), SILENCE_S, lambda _: None)
        self.running = asyncio.create_task(self.attempt.run(SPEC))

    def link(self, info: WorkerInfo) -> SilentLink:
        return self.prefill if info.role is Role.PREFILL else self.decode

    def engine_steps(self, info: WorkerInfo) -> int:
        self.num_asked += 1
        return next(self.steps.get(info.role, iter([0])))

    async def get_to(self, stage: str) -> None:
        """Says what brings it to `reserve`, `prefill`, `hand-off` or `decode`."""
        await self.decode.asked.wait()
        if stage == "reserve":
            return
        self.decode.says.reserved(b"ticket", b"endpoint")
        await self.prefill.asked.wait()
        if stage == "prefill":
            return
        self.prefill.says.prefill_done(delta(0), 0.0, 0.0)
        if stage == "decode":
            self.prefill.says.handoff_done(1, 0.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def failure(self) -> TandemError:
        async with asyncio.timeout(5):
            with pytest.raises(TandemError) as caught:
                await self.running
        return caught.value


def delta(offset: int, finish_reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(offset, (TokenId(7),), (), finish_reason)


@pytest.fixture
def pair(info: Callable[..., WorkerInfo], clock: ManualClock) -> Callable[[], Pair]:
    return lambda: Pair(info, clock)


@pytest.mark.parametrize(("stage", "role"), [("reserve", Role.DECODE), ("prefill", Role.PREFILL)])
async def test_to_wait_in_the_line_of_an_engine_that_moves_is_not_silence(
    pair: Callable[[], Pair], stage: str, role: Role
) -> None:
    running = pair()
    running.steps[role] = itertools.count(1)
    await running.get_to(stage)
    for _ in range(3):
        asked = running.num_asked
        running.clock.advance_s(2 * SILENCE_S)
        await running.until(lambda asked=asked: running.num_asked > asked)  # type: ignore[misc]
    assert not running.running.done()
    if stage == "reserve":
        await running.get_to("decode")
    else:
        running.prefill.says.prefill_done(delta(0), 0.0, 0.0)
        running.prefill.says.handoff_done(1, 0.0)
    running.decode.says.tokens(delta(1, FinishReason.STOP))
    await running.running


@pytest.mark.parametrize(
    ("stage", "silent"),
    [
        ("reserve", Role.DECODE),
        ("prefill", Role.PREFILL),
        ("hand-off", Role.PREFILL),
        ("decode", Role.DECODE),
    ],
)
async def test_silence_tells_against_the_worker_whose_word_is_due(
    pair: Callable[[], Pair], stage: str, silent: Role
) -> None:
    running = pair()
    await running.get_to(stage)
    running.clock.advance_s(2 * SILENCE_S)
    failure = await running.failure()
    assert isinstance(failure, Unavailable)
    assert failure.message.startswith(f"worker {silent} said nothing")
    assert running.attempt.culprit == running.infos[silent]


async def test_once_it_runs_a_moving_engine_is_no_word_of_the_sequence(pair: Callable[[], Pair]) -> None:
    running = pair()
    running.steps[Role.DECODE] = itertools.count(1)
    await running.get_to("decode")
    running.clock.advance_s(2 * SILENCE_S)
    assert "said nothing" in (await running.failure()).message


@pytest.mark.parametrize(
    ("first", "second"),
    [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)],
)
@pytest.mark.parametrize("cause", [InternalError("step failed"), Unavailable("it was lost", Reason.WORKER_LOST)])
async def test_a_worker_that_says_why_a_hand_off_failed_is_the_culprit_though_the_other_was_heard_first(
    pair: Callable[[], Pair], first: Role, second: Role, cause: TandemError
) -> None:
    running = pair()
    await running.get_to("prefill")
    links = {Role.PREFILL: running.prefill, Role.DECODE: running.decode}
    links[first].says.failed(TransferError("the peer gave up"))
    await asyncio.sleep(0)
    links[second].says.failed(cause)
    assert await running.failure() is cause
    assert running.attempt.culprit == running.infos[second]


async def test_of_two_words_about_a_hand_off_the_first_counts_and_without_a_second_it_stands(
    pair: Callable[[], Pair],
) -> None:
    first = TransferError("the peer gave up")
    for num_words in (1, 2):
        running = pair()
        await running.get_to("prefill")
        running.decode.says.failed(first)
        if num_words == 2:
            running.prefill.says.failed(TransferError("gave up"))
        assert await running.failure() is first
        assert running.attempt.culprit == running.infos[Role.DECODE]
