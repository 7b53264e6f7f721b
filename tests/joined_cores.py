"""A router's attempts on the cores of one prefill and one decode worker, in one loop: no gRPC, no model, no wire.

Both engines keep tokens where a model would keep KV (`tests.token_engine`); a hand-off copies them from pool to pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from engine.step import SampledToken
from prefill_worker.prompts import new_prefill_worker
from router.attempt import Attempt
from router.choice_stream import ChoiceStream
from router.delivery import Delivery
from router.placement import Placement
from router.worker_link import GroupListener
from shell.config import DecodeConfig
from shell.telemetry.events import Events, RequestEvents
from tandem.convert import group_from_proto
from tandem.errors import TandemError
from tandem.types import (
    UNKNOWN_ROUTE,
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    Incarnation,
    KvRoute,
    RequestId,
    Role,
    SamplingParams,
    TextParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WaitReason,
    WorkerId,
    WorkerInfo,
)
from tandem.v1 import worker_pb2
from tests.fake_disk import LateDisk
from tests.manual_clock import ManualClock
from tests.registering import INFO, UncountedLoad, assigned
from tests.token_engine import VOCAB_SIZE, WAIT_S, FakeEngine
from tests.wire import BLOCK_SIZE, Wire
from tests.worker_parts import parts_of
from worker.core import Worker
from worker.ports import Destination, RouterPort

SILENCE_S = 0.01
"""On a clock that the tests move."""


def info_of(role: Role) -> WorkerInfo:
    """A worker that fits every other one."""
    return replace(
        INFO,
        worker_id=WorkerId(role.value),
        incarnation=Incarnation(f"{role.value}-life"),
        role=role,
        transports=("wire",),
        max_sequence_tokens=4096,
    )


class CoreLink(RouterPort):
    """A `WorkerLink` to a core, and the `RouterPort` that the core answers to."""

    def __init__(self, info: WorkerInfo, core: Any) -> None:
        self._info, self._core = info, core
        self._listeners: dict[Handle, GroupListener] = {}
        self._num_handles = 0
        self.handles: list[Handle] = []
        """All that it was asked for."""
        self.waits: dict[WaitReason, Sequence[Handle]] = {}
        """Since they were last cleared."""
        self.failures: list[TandemError] = []
        self.holds_words = False
        """Whether ends of hand-offs are told by `tell_held` alone."""
        self._held: list[tuple[Handle, int, float, KvRoute]] = []

    # --- from the attempt ---

    def watch(self, listener: GroupListener) -> Handle:
        return self._handle(listener)

    def reserve(
        self, handle: Handle, group: worker_pb2.Group, *, local_prefill: bool, max_local_tokens: int | None = None
    ) -> None:
        self.handles.append(handle)
        self._core.reserve(self, handle, group_from_proto(group), local_prefill, max_local_tokens)

    def prefill(self, group: worker_pb2.Group, listener: GroupListener, destination: str) -> Handle:
        handle = self._handle(listener)
        self.handles.append(handle)
        self._core.prefill(self, handle, group_from_proto(group), destination)
        return handle

    def grant(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        self._core.grant(self, handle, ticket, kv_endpoint)

    def move(self, handle: Handle, choices: Sequence[Any], ticket: bytes, kv_endpoint: bytes) -> None:
        known = {each.index: len(each.output_token_ids) for each in choices}
        self._core.move(self, handle, Destination(frozenset(known), min(known.values()), ticket, kv_endpoint))

    def listen(self, handle: Handle, listener: GroupListener) -> bool:
        if handle not in self._listeners:
            return False
        self._listeners[handle] = listener
        return True

    def release(self, handle: Handle) -> None:
        if self._listeners.pop(handle, None) is not None:
            self._core.release(self, handle)  # a no-op for one that was only watched

    def _handle(self, listener: GroupListener) -> Handle:
        self._num_handles += 1
        handle = Handle(self._num_handles)
        self._listeners[handle] = listener
        return handle

    # --- from the core ---

    def _tell(self, handle: Handle, name: str, *args: Any) -> None:
        # As over a stream: never from within what the core is doing.
        def told() -> None:
            if handle in self._listeners:
                getattr(self._listeners[handle], name)(self._info, *args)

        asyncio.get_running_loop().call_soon(told)

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        self._tell(handle, "reserved", ticket, kv_endpoint)

    def prefill_started(self, handle: Handle) -> None:
        self._tell(handle, "prefill_started")

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        self._tell(handle, "prefill_done", queue_s, prefill_s, cached_tokens)

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        self._tell(handle, "tokens", TokenDelta(offset, (token.token_id,), (), finish_reason, index))

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        self._held.append((handle, num_bytes, seconds, route))
        if not self.holds_words:
            self.tell_held()

    def tell_held(self) -> None:
        """Of all hand-offs that have ended."""
        held, self._held = self._held, []
        for handle, *what in held:
            self._tell(handle, "handoff_done", *what)

    def leaving(self, handle: Handle) -> None:
        self._tell(handle, "leaving")

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        self.waits[reason] = handles
        for handle in handles:
            self._tell(handle, "waiting")

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        self._tell(handle, "prompt_logprobs", offset, tuple(logprobs))

    def failed(self, handle: Handle, error: TandemError) -> None:
        self.failures.append(error)
        self._tell(handle, "failed", error)


class Ids:
    """A detokenizer that keeps the ids."""

    def __init__(self) -> None:
        self.ids: list[TokenId] = []

    def step(self, token_id: TokenId) -> str:
        self.ids.append(token_id)
        return ""

    def finish(self) -> str:
        return ""


def delivery_of(ids: Sequence[Ids]) -> Delivery:
    """One for a choice each."""
    detokenizers: Sequence[Any] = ids
    streams = [ChoiceStream(index, each, TextParams(), lambda _: None) for index, each in enumerate(detokenizers)]
    return Delivery(streams, Events())


def attempt_of(
    cores: Any,
    placement: Placement,
    delivery: Delivery,
    silence_s: float,
    events: RequestEvents | None = None,
    source: Attempt | None = None,
) -> Attempt:
    events, now_s = events or Events(), cores.clock.now_s()
    ends: Any = (lambda _: None, lambda: None)
    return Attempt(assigned(placement), cores, delivery, events, cores.clock, now_s, silence_s, *ends, source)


def spec_of(
    num_prompt_tokens: int,
    max_tokens: int,
    salt: int = 0,
    *,
    n: int = 1,
    seed: int = 0,
    beam_width: int = 0,
    priority: int = 0,
) -> GroupSpec:
    prompt = tuple(TokenId((37 * salt + 11 * i) % VOCAB_SIZE) for i in range(num_prompt_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, beam_width=beam_width)
    return GroupSpec(RequestId(f"r{salt}"), prompt, sampling, tuple(map(ChoiceSpec, range(n))), priority=priority)


class Cores(UncountedLoad):
    """Workers' cores that run inside `async with`; at its end all must be idle."""

    workers: Sequence[tuple[FakeEngine, Worker, CoreLink]]

    async def __aenter__(self) -> Self:
        self._running = [asyncio.create_task(core.run()) for _, core, _ in self.workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine, core, link in self.workers:
            engine.let_go()
            core.router_lost(link)
        for _, core, _link in self.workers:
            async with asyncio.timeout(WAIT_S):
                await core.drained()
            core.check_idle()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def until(self, condition: Callable[[], object]) -> None:
        """No time passes."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0)


class Running:
    """One attempt under way."""

    def __init__(self, cores: Any, spec: GroupSpec) -> None:
        self.spec = spec
        self._ids = Ids()
        placement = Placement(cores.infos[Role.PREFILL], cores.infos[Role.DECODE])
        self._attempt = attempt_of(cores, placement, delivery_of([self._ids]), SILENCE_S)
        self.task = asyncio.create_task(self._run(spec))

    async def _run(self, spec: GroupSpec) -> None:
        try:
            await self._attempt.run(spec)
        finally:
            self._attempt.release()

    @property
    def tokens(self) -> list[TokenId]:
        """So far."""
        return self._ids.ids


class JoinedCores(Cores):
    """A prefill and a decode worker."""

    def __init__(
        self,
        *,
        prefill_blocks: int = 32,
        decode_blocks: int = 64,
        max_seqs: int = 8,
        host_rows: int = 0,
        disk_slots: int = 0,
    ) -> None:
        self.infos = {role: info_of(role) for role in Role}
        self.clock = ManualClock()
        self.pools = {
            Role.PREFILL: BlockPool(prefill_blocks, BLOCK_SIZE),
            Role.DECODE: BlockPool(decode_blocks, BLOCK_SIZE),
        }
        self.engines = {role: FakeEngine(pool) for role, pool in self.pools.items()}
        self.caches = {
            role: PrefixCache(
                pool,
                tier=HostTier(host_rows, 1) if host_rows else None,
                disk=LateDisk(disk_slots, self.engines[role].rows) if disk_slots else None,
            )
            for role, pool in self.pools.items()
        }
        wire: Any = Wire(self.engines[Role.PREFILL], self.engines[Role.DECODE])
        prefill, decode = (
            parts_of(self.engines[role], self.caches[role], self.clock, max_seqs=seqs, chunk_tokens=chunk)
            for role, seqs, chunk in ((Role.PREFILL, 4, 8), (Role.DECODE, max_seqs, 16))
        )
        self.prefill = new_prefill_worker(prefill, wire)
        self.decode = new_decode_worker(decode, wire, DecodeConfig(), first_guess_tokens=4)
        self.links = {
            Role.PREFILL: CoreLink(self.infos[Role.PREFILL], self.prefill),
            Role.DECODE: CoreLink(self.infos[Role.DECODE], self.decode),
        }

        self.workers = [
            (self.engines[role], core, self.links[role])
            for role, core in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        ]

    def link(self, info: WorkerInfo) -> CoreLink:
        """As `Workers` gives it."""
        return self.links[info.role]

    def start(self, spec: GroupSpec) -> Running:
        """One attempt."""
        return Running(self, spec)

    def check_invariants(self) -> None:
        """Of both caches and their pools."""
        for cache in self.caches.values():
            cache.check_invariants()

    def num_waiting(self, role: Role) -> dict[WaitReason, int]:
        """As its worker says it now."""
        self.links[role].waits.clear()
        (self.prefill if role is Role.PREFILL else self.decode).report_waits()
        return {reason: len(handles) for reason, handles in self.links[role].waits.items()}

    async def time_passes(self, seconds: float) -> None:
        """In parts shorter than the silence, with the word of who waits in each, as their tickers bring it."""
        until_s = self.clock.now_s() + seconds
        while self.clock.now_s() < until_s:
            self.clock.advance_s(SILENCE_S / 2)
            self.prefill.report_waits()
            self.decode.report_waits()
            await asyncio.sleep(2 * SILENCE_S)
