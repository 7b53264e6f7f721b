"""Fakes of everything around the prefill worker: an engine, a sender, a router; and the worker among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest

from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.guides import Guides
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from kvtransfer.base import TransferReport
from prefill_worker.prompts import new_prefill_worker
from tandem.first_tokens import decode_first_tokens
from tandem.types import (
    BlockId,
    ChoiceSpec,
    GroupSpec,
    Handle,
    RequestId,
    SamplingParams,
    TokenId,
)
from tests.heard_router import HeardRouter
from tests.manual_clock import ManualClock
from tests.prompt_engine import BLOCK_SIZE, DEADLINE_S, FakeEngine, Gate, token_at
from tests.recorded_events import RecordedWorker
from tests.worker_parts import parts_of


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


class Bench:
    """A prefill worker among its fakes. 16 blocks of 4 tokens, 8 tokens a step."""

    def __init__(
        self, cached: bool = True, host_rows: int = 0, guides: Guides | None = None, is_asynchronous: bool = False
    ) -> None:
        self.engine = FakeEngine(is_asynchronous=is_asynchronous)
        self.sender = FakeSender(self.engine.slots)
        self.router = HeardRouter()
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
        router: HeardRouter | None = None,
        *,
        grant: bool = True,
        destination: str = "decode-1",
    ) -> Handle:
        self.worker.prefill(router or self.router, Handle(handle), spec, destination)
        if grant:
            self.grant(handle, router)
        return Handle(handle)

    def grant(self, handle: int, router: HeardRouter | None = None) -> None:
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
def other_router() -> HeardRouter:
    return HeardRouter()
