"""Fakes of everything around the prefill worker: an engine, a sender, a router; and the worker among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.guides import Guides
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from engine.step import (
    SampledToken,
)
from kvtransfer.base import TransferReport
from prefill_worker.prompts import new_prefill_worker
from tandem.errors import TandemError
from tandem.first_tokens import decode_first_tokens
from tandem.types import (
    BlockId,
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WaitReason,
)
from tests.manual_clock import ManualClock
from tests.prompt_engine import BLOCK_SIZE, DEADLINE_S, FakeEngine, Gate, token_at
from tests.recorded_events import RecordedWorker
from tests.worker_parts import parts_of
from worker.ports import RouterPort


class FakeHandoff:
    """Keeps what was pushed; reads its blocks from the first push until the call ends or `abort` returns."""

    def __init__(self, sender: FakeSender, ticket: bytes) -> None:
        self._sender = sender
        self.ticket = ticket
        self.pushes: list[tuple[int, tuple[BlockId, ...]]] = []
        self.first_block = sender.first_block
        self.committed: Mapping[int, TokenId] | None = None
        self.num_aborts = 0

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        self.pushes.append((first, source_blocks))
        slots = self._sender.slots
        for position, block in enumerate(source_blocks, first):  # what the decode worker reads is in place
            assert slots[block, 0] == token_at(position * BLOCK_SIZE)
        await self._sender.push_gate.passed()
        self._sender.raise_error("push")

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        await self._sender.commit_gate.passed()
        self._sender.raise_error("commit")
        self.committed = decode_first_tokens(first_token_payload)
        num_blocks = sum(len(blocks) for _, blocks in self.pushes)
        return TransferReport("fake", num_blocks, num_blocks * 100, 0.25)

    async def abort(self) -> None:
        if self.committed is None:
            self.num_aborts += 1
            await self._sender.abort_gate.passed()


class FakeSender:
    """A sender with a gate before each answer and an error to raise in a named call."""

    def __init__(self, slots: Mapping[tuple[BlockId, int], TokenId]) -> None:
        self.slots = slots
        self.open_gate, self.push_gate, self.commit_gate, self.abort_gate = Gate(), Gate(), Gate(), Gate()
        self.errors: dict[str, Exception] = {}
        self.first_block = 0
        """Of the offers to come."""
        self.handoffs: list[FakeHandoff] = []

    def raise_error(self, call: str) -> None:
        if call in self.errors:
            raise self.errors.pop(call)

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> FakeHandoff:
        await self.open_gate.passed()
        self.raise_error("open")
        handoff = FakeHandoff(self, ticket)
        self.handoffs.append(handoff)
        return handoff

    async def stop(self) -> None:
        """Nothing to stop."""


@dataclass
class FakeRouter(RouterPort):
    """Keeps what it was told, by handle, and lets tests wait for it."""

    started: list[Handle] = field(default_factory=list)
    waits: dict[WaitReason, list[Handle]] = field(default_factory=dict)
    """The newest word of each reason."""
    choices: dict[Handle, dict[int, TokenDelta]] = field(default_factory=dict)
    """First tokens by choice; an entry from `prefill_done` on."""
    times_s: dict[Handle, tuple[float, float]] = field(default_factory=dict)
    cached_tokens: dict[Handle, int] = field(default_factory=dict)
    handoffs: dict[Handle, tuple[int, float]] = field(default_factory=dict)
    errors: dict[Handle, TandemError] = field(default_factory=dict)
    prompt_scores: dict[Handle, list[TokenLogprobs]] = field(default_factory=dict)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    __hash__ = object.__hash__

    @property
    def first_tokens(self) -> dict[Handle, TokenDelta]:
        """Of requests whose only choice is number 0."""
        return {handle: choices[0] for handle, choices in self.choices.items()}

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        raise AssertionError("a prefill worker reserves nothing")

    def prefill_started(self, handle: Handle) -> None:
        assert handle not in self.choices
        self.started.append(handle)
        self._told.set()

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        self.waits[reason] = list(handles)

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        assert handle not in self.choices
        self.choices[handle] = {}
        self.times_s[handle] = (queue_s, prefill_s)
        self.cached_tokens[handle] = cached_tokens
        self._told.set()

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        assert index not in self.choices[handle]
        self.choices[handle][index] = TokenDelta(offset, (token.token_id,), finish_reason=finish_reason, index=index)

    def leaving(self, handle: Handle) -> None:
        raise AssertionError("only a decode worker that drains says so")

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        assert handle in self.choices
        self.handoffs[handle] = (num_bytes, seconds)
        self._told.set()

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        assert handle not in self.choices
        told = self.prompt_scores.setdefault(handle, [])
        assert offset == 1 + len(told)
        told += logprobs

    def failed(self, handle: Handle, error: TandemError) -> None:
        assert handle not in self.errors
        self.errors[handle] = error
        self._told.set()

    async def hears(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._told.clear()
                await self._told.wait()


class Bench:
    """A prefill worker among its fakes. 16 blocks of 4 tokens, 8 tokens a step."""

    def __init__(self, cached: bool = True, host_rows: int = 0, guides: Guides | None = None) -> None:
        self.engine = FakeEngine()
        self.sender = FakeSender(self.engine.slots)
        self.router = FakeRouter()
        self.clock = ManualClock()
        self.pool = BlockPool(16, BLOCK_SIZE)
        tier = HostTier(host_rows, block_bytes=1) if host_rows else None
        self.cache = PrefixCache(self.pool, enabled=cached, tier=tier)
        self.recorded = RecordedWorker()
        parts = parts_of(
            self.engine,
            self.cache,
            self.clock,
            max_seqs=4,
            chunk_tokens=8,
            max_tokens=64,
            events=self.recorded.events,
            guides=guides,
        )
        self.worker = new_prefill_worker(parts, self.sender)
        self.running = asyncio.create_task(self.worker.run())

    def prefill(
        self,
        handle: int,
        spec: GroupSpec,
        router: FakeRouter | None = None,
        *,
        grant: bool = True,
        destination: str = "decode-1",
    ) -> Handle:
        self.worker.prefill(router or self.router, Handle(handle), spec, destination)
        if grant:
            self.grant(handle, router)
        return Handle(handle)

    def grant(self, handle: int, router: FakeRouter | None = None) -> None:
        self.worker.grant(router or self.router, Handle(handle), b"ticket-%d" % handle, b"endpoint")

    async def settles(self) -> None:
        """Everything ended and every block is free."""
        async with asyncio.timeout(DEADLINE_S):
            await self.worker.drained()
        self.worker.check_idle()
        self.cache.check_invariants()
        self.recorded.check_all_ended()

    async def close(self) -> None:
        for gate in self.gates:
            await gate.open()
        self.worker.router_lost(self.router)
        await self.settles()
        assert not self.running.done() or isinstance(self.running.exception(), EngineBroken)
        self.running.cancel()
        with pytest.raises((asyncio.CancelledError, EngineBroken)):
            await self.running

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Whatever can hold a prompt up."""
        return (self.engine.gate, *self._sender_gates())

    def _sender_gates(self) -> tuple[Gate, ...]:
        return (self.sender.open_gate, self.sender.push_gate, self.sender.commit_gate, self.sender.abort_gate)


def _make_spec(
    num_tokens: int,
    *,
    max_tokens: int = 4,
    num_output_tokens: Sequence[int] = (0,),
    end_token_ids: frozenset[int] = frozenset(),
    prompt_logprobs: int | None = None,
    timeout_s: float | None = None,
    priority: int = 0,
    cache_salt: str = "",
) -> GroupSpec:
    def tokens(start: int, end: int) -> tuple[TokenId, ...]:
        return tuple(map(token_at, range(start, end)))

    return GroupSpec(
        request_id=RequestId("request"),
        prompt_token_ids=tokens(0, num_tokens),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            end_token_ids=frozenset(TokenId(token) for token in end_token_ids),
            prompt_logprobs=prompt_logprobs,
        ),
        choices=tuple(
            ChoiceSpec(index, tokens(num_tokens, num_tokens + num)) for index, num in enumerate(num_output_tokens)
        ),
        timeout_s=timeout_s,
        priority=priority,
        cache_salt=cache_salt,
    )


SpecMaker = Callable[..., GroupSpec]


@pytest.fixture(scope="session")
def make_spec() -> SpecMaker:
    """Prompts 1, 2, 3, …; the fake engine's first token is the last one plus the number of tokens plus the seed.

    `num_output_tokens`: of each choice, of which there is one by default.
    """
    return _make_spec


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


@pytest.fixture(scope="session")
def bench_type() -> type[Bench]:
    """For tests that run a loop of their own."""
    return Bench


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        made.append(Bench(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def other_router() -> FakeRouter:
    return FakeRouter()
