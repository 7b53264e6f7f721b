"""One try, with workers whose every word is spoken here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from router.attempt import Attempt
from router.choice_stream import ChoiceStream
from router.delivery import Delivery
from router.placement import Placement
from router.worker_link import GroupListener
from shell.telemetry.events import Events
from tandem.errors import InternalError, Reason, TandemError, TransferError, Unavailable
from tandem.lifecycle import RequestState
from tandem.types import (
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    RequestId,
    Role,
    SamplingParams,
    TextParams,
    TokenDelta,
    TokenId,
    WorkerInfo,
)
from tandem.v1 import worker_pb2
from tests.manual_clock import ManualClock
from tests.recorded_events import RecordedRequest
from tests.registering import UncountedLoad, assigned

NOBODY = Events()
PATIENCE_S = 30.0
SILENCE_S = 0.01
"""On a clock that the tests move."""
SPEC = GroupSpec(RequestId("r"), (TokenId(1),), SamplingParams(max_tokens=3))


class SilentLink:
    """A stream to a worker that says only what the test says for it."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.asked = asyncio.Event()
        self.grants: list[tuple[Handle, bytes, bytes]] = []
        self.is_released = False

    def watch(self, listener: GroupListener) -> Handle:
        self.listener = listener
        return Handle(1)

    def reserve(
        self, handle: Handle, group: worker_pb2.Group, *, local_prefill: bool, max_local_tokens: int | None = None
    ) -> None:
        self.group = group
        self.asked.set()

    def prefill(self, group: worker_pb2.Group, listener: GroupListener, destination: str) -> Handle:
        self.destination = destination
        self.listener = listener
        self.asked.set()
        return Handle(1)

    def grant(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        self.grants.append((handle, ticket, kv_endpoint))

    def release(self, _: Handle) -> None:
        self.is_released = True

    def says(self, name: str, *args: Any) -> None:
        """Tells the listener, as a WorkerLink does."""
        getattr(self.listener, name)(self.info, *args)


class NoText:
    """A detokenizer for tests in which no text is looked at."""

    def step(self, _: TokenId) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Pair(UncountedLoad):
    """One attempt on a pair of workers, under way."""

    def __init__(self, info: Callable[..., WorkerInfo], clock: ManualClock, spec: GroupSpec = SPEC) -> None:
        self.infos = {role: info(role, role) for role in Role}
        self.prefill, self.decode = (SilentLink(self.infos[role]) for role in (Role.PREFILL, Role.DECODE))
        placement = Placement(self.infos[Role.PREFILL], self.infos[Role.DECODE])
        no_text: Any = NoText()
        choices = [ChoiceStream(each.index, no_text, TextParams(), lambda _: None) for each in spec.choices]
        self.delivery = Delivery(choices, NOBODY)
        for each in spec.choices:
            if each.output_token_ids:
                self.delivery.push(TokenDelta(0, each.output_token_ids, index=each.index))
        links: Any = self
        self.clock = clock
        self.stages: list[RequestState] = []
        self.ends: list[str] = []
        """Outcomes of the pair, as the attempt reported them to `Workers`."""
        self.attempt = Attempt(
            assigned(placement),
            links,
            self.delivery,
            RecordedRequest().events,
            clock,
            clock.now_s(),
            SILENCE_S,
            self.stages.append,
            lambda: self.ends.append("decoded"),
        )
        self.running = asyncio.create_task(self.attempt.run(spec))

    def end(self, *_: Any, arrived: bool) -> None:
        self.ends.append(f"end, arrived: {arrived}")

    def link(self, info: WorkerInfo) -> SilentLink:
        return self.prefill if info.role is Role.PREFILL else self.decode

    async def get_to(self, stage: str) -> None:
        """Says what brings it to `line`, `reserve`, `prefill`, `hand-off` or `decode`."""
        await self.prefill.asked.wait()
        if stage == "line":
            return
        self.prefill.says("prefill_started")
        if stage == "reserve":
            return
        self.decode.says("reserved", b"ticket", b"endpoint")
        if stage == "prefill":
            return
        self.prefill.says("prefill_done", 0.0, 0.0, 0)
        self.prefill.says("tokens", delta(0))
        if stage == "decode":
            self.prefill.says("handoff_done", 1, 0.0)

    async def passes(self, seconds: float) -> None:
        """So much time, in which everything that is due happens."""
        self.clock.advance_s(seconds)
        await asyncio.sleep(2 * SILENCE_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def failure(self) -> TandemError:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TandemError) as caught:
                await self.running
        return caught.value


def delta(offset: int, finish_reason: FinishReason | None = None, index: int = 0) -> TokenDelta:
    return TokenDelta(offset, (TokenId(7),), (), finish_reason, index)


@pytest.fixture
def pair(info: Callable[..., WorkerInfo], clock: ManualClock) -> Callable[..., Pair]:
    return partial(Pair, info, clock)


STAGES = ("line", "reserve", "prefill", "hand-off", "decode")
HOLDERS = {
    "line": (Role.PREFILL,),
    "reserve": (Role.PREFILL, Role.DECODE),
    "prefill": (Role.PREFILL, Role.DECODE),
    "hand-off": (Role.PREFILL, Role.DECODE),
    "decode": (Role.DECODE,),
}
"""Who holds the request in each stage, and has to say so."""


@pytest.mark.parametrize("stage", STAGES)
async def test_to_wait_is_not_silence_while_each_worker_that_holds_it_says_so(
    pair: Callable[..., Pair], stage: str
) -> None:
    running = pair()
    await running.get_to(stage)
    for _ in range(4):
        await running.passes(0.75 * SILENCE_S)
        for role in HOLDERS[stage]:
            running.link(running.infos[role]).says("waiting")
    assert not running.running.done()
    running.prefill.says("prefill_started")
    running.prefill.says("tokens", delta(0))
    running.decode.says("reserved", b"ticket", b"endpoint")
    running.decode.says("tokens", delta(1, FinishReason.STOP))
    await running.running


@pytest.mark.parametrize(("stage", "silent"), [(stage, role) for stage, roles in HOLDERS.items() for role in roles])
async def test_silence_tells_against_the_worker_whose_word_is_due_whatever_the_other_says(
    pair: Callable[..., Pair], stage: str, silent: Role
) -> None:
    running = pair()
    await running.get_to(stage)
    other = running.decode if silent is Role.PREFILL else running.prefill
    for _ in range(2):
        running.clock.advance_s(SILENCE_S)
        if other.asked.is_set():
            other.says("waiting")
    failure = await running.failure()
    assert isinstance(failure, Unavailable)
    assert failure.message.startswith(f"worker {silent} said nothing")
    assert running.attempt.culprit == running.infos[silent]


async def test_room_is_asked_for_when_the_prompt_is_begun_and_not_before(pair: Callable[..., Pair]) -> None:
    running = pair()
    await running.get_to("line")
    assert running.prefill.destination == running.decode.info.worker_id
    await running.passes(SILENCE_S / 2)
    assert not running.decode.asked.is_set()
    running.prefill.says("prefill_started")
    assert running.decode.asked.is_set()
    assert running.prefill.grants == []
    running.decode.says("reserved", b"ticket", b"endpoint")
    assert running.prefill.grants == [(Handle(1), b"ticket", b"endpoint")]
    running.attempt.release()
    running.running.cancel()


async def test_the_loss_of_the_decode_worker_ends_the_wait_in_the_line_at_once(pair: Callable[..., Pair]) -> None:
    running = pair()
    await running.get_to("line")
    running.decode.says("failed", Unavailable("it was lost", Reason.WORKER_LOST))
    assert (await running.failure()).reason is Reason.WORKER_LOST
    assert running.attempt.culprit == running.infos[Role.DECODE]
    running.attempt.release()
    assert running.prefill.is_released


async def test_the_decode_worker_is_told_what_is_left_of_the_time_after_the_line(pair: Callable[..., Pair]) -> None:
    running = pair(replace(SPEC, timeout_s=10.0))
    await running.get_to("line")
    running.clock.advance_s(4.0)
    running.prefill.says("prefill_started")
    assert running.decode.group.timeout_seconds == pytest.approx(6.0)
    running.running.cancel()


@pytest.mark.parametrize(
    ("first", "second"),
    [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)],
)
@pytest.mark.parametrize("cause", [InternalError("step failed"), Unavailable("it was lost", Reason.WORKER_LOST)])
async def test_a_worker_that_says_why_a_hand_off_failed_is_the_culprit_though_the_other_was_heard_first(
    pair: Callable[..., Pair], first: Role, second: Role, cause: TandemError
) -> None:
    running = pair()
    await running.get_to("prefill")
    links = {Role.PREFILL: running.prefill, Role.DECODE: running.decode}
    links[first].says("failed", TransferError("the peer gave up"))
    await asyncio.sleep(0)
    links[second].says("failed", cause)
    assert await running.failure() is cause
    assert running.attempt.culprit == running.infos[second]


async def test_of_two_words_about_a_hand_off_the_first_counts_and_without_a_second_it_stands(
    pair: Callable[..., Pair],
) -> None:
    first = TransferError("the peer gave up")
    for num_words in (1, 2):
        running = pair()
        await running.get_to("prefill")
        running.decode.says("failed", first)
        if num_words == 2:
            running.prefill.says("failed", TransferError("gave up"))
        assert await running.failure() is first
        assert running.attempt.culprit == running.infos[Role.DECODE]


def resumed(*tokens_before: int) -> GroupSpec:
    """A group whose choices have so many tokens already."""
    choices = (ChoiceSpec(index, (TokenId(7),) * count) for index, count in enumerate(tokens_before))
    return GroupSpec(RequestId("r"), (TokenId(1),), SamplingParams(max_tokens=9), tuple(choices))


async def test_several_choices_that_are_resumed_have_a_computed_prompt_without_first_tokens(
    pair: Callable[..., Pair],
) -> None:
    running = pair(resumed(2, 3))
    await running.get_to("prefill")
    running.prefill.says("prefill_done", 0.0, 0.0, 0)
    running.prefill.says("handoff_done", 1, 0.0)
    running.prefill.says("failed", Unavailable("it was lost", Reason.WORKER_LOST))
    running.decode.says("tokens", delta(2, FinishReason.STOP, 0))
    running.decode.says("tokens", delta(3, FinishReason.STOP, 1))
    await running.running


async def test_a_beam_search_awaits_no_first_token(pair: Callable[..., Pair]) -> None:
    search = replace(resumed(0, 0), sampling=SamplingParams(max_tokens=9, beam_width=3))
    running = pair(search)
    await running.get_to("prefill")
    running.prefill.says("prefill_done", 0.0, 0.0, 0)
    running.prefill.says("handoff_done", 1, 0.0)
    running.prefill.says("failed", Unavailable("it was lost", Reason.WORKER_LOST))
    for index in (0, 1):
        running.decode.says("tokens", delta(0, FinishReason.STOP, index))
    await running.running


@pytest.mark.parametrize(("tokens_before", "first"), [((0, 0), (0, 1)), ((2, 0), (1,)), ((2,), (0,))])
async def test_the_loss_of_prefill_matters_until_each_first_token_it_draws_is_here(
    pair: Callable[..., Pair], tokens_before: tuple[int, ...], first: tuple[int, ...]
) -> None:
    for num_first in range(len(first) + 1):
        running = pair(resumed(*tokens_before))
        await running.get_to("prefill")
        running.prefill.says("prefill_done", 0.0, 0.0, 0)
        for index in first[:num_first]:
            running.prefill.says("tokens", delta(tokens_before[index], index=index))
        running.decode.says("tokens", delta(tokens_before[0] + (0 in first), index=0))  # it holds the KV
        running.prefill.says("failed", Unavailable("it was lost", Reason.WORKER_LOST))
        if num_first < len(first):
            assert isinstance(await running.failure(), Unavailable)
            continue
        for index, count in enumerate(tokens_before):
            running.decode.says("tokens", TokenDelta(count, (TokenId(7),) * 5, (), FinishReason.STOP, index))
        await running.running


async def test_tokens_alone_say_that_the_prompt_is_computed(pair: Callable[..., Pair]) -> None:
    running = pair()
    await running.get_to("prefill")
    running.prefill.says("tokens", delta(0))
    await asyncio.sleep(0)
    assert running.stages[-1] is RequestState.DECODING
    running.running.cancel()


async def test_a_pair_is_reported_once_to_have_decoded_and_once_to_have_ended(pair: Callable[..., Pair]) -> None:
    for has_arrived in (False, True):
        running = pair()
        await running.get_to("decode" if has_arrived else "hand-off")
        if has_arrived:
            assert running.ends == []  # the first token is the prefill worker's
            running.decode.says("tokens", delta(1))
            running.decode.says("tokens", delta(2, FinishReason.STOP))
            await running.running
        running.running.cancel()
        for _ in range(2):
            running.attempt.release()
        assert running.ends == ["decoded"] * has_arrived + [f"end, arrived: {has_arrived}"]
