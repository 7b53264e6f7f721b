"""One simulated request: admitted, placed, followed on its pair, tried again where a worker is lost.

    waits ─▶ placed ─▶ prefill worker's line ─▶ room on the decode worker ─▶ hand-off ─▶ tokens ─▶ ended
               ▲                 └── a worker was lost, a hand-off failed ──┘
               └─────────────────────────────────┘

As `router.generation` and `router.attempt`, in the order of their messages, without gRPC; placement, admission and
cores are the real ones. Does not hand over what runs on a worker that drains: simulated workers are lost, not drained.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from engine.step import SampledToken
from router.admission import Admission
from router.assignment import Assignment
from router.placement import Demand
from router.prefix_map import Prefix
from router.workers import Workers
from shell.clock import Clock, Deadline
from simulator.engine import OUTPUT_TOKEN
from simulator.outcomes import Outcome, gap_p95
from simulator.traces import Ask
from simulator.worker import SimulatedWorker
from tandem.errors import PrefixNotHeld, TandemError, Unavailable
from tandem.types import (
    UNKNOWN_ROUTE,
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    Incarnation,
    KvRoute,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
    WaitReason,
    WorkerId,
)
from worker.core import Worker
from worker.ports import RouterPort

MAX_TRIES = 8
"""That make no progress."""
MOST_WAIT_S = 600.0
"""For a pair of workers."""
_HANDLE = Handle(1)
_Ask: TypeAlias = Callable[[Worker], None]
_Then: TypeAlias = Callable[[], None]


class Rooms:
    """What all requests share."""

    def __init__(
        self,
        workers: Workers,
        admission: Admission,
        named: Mapping[WorkerId, SimulatedWorker],
        clock: Clock,
        message_s: float,
    ) -> None:
        self.workers = workers
        self.admission = admission
        self.named = named
        self.clock = clock
        self.message_s = message_s
        self.placements: Counter[str] = Counter()


class Attempt(RouterPort):
    """A `worker.ports.RouterPort` for one request on one pair."""

    def __init__(self, rooms: Rooms, assignment: Assignment, spec: GroupSpec, times_s: array[float]) -> None:
        """`times_s`: when the client had each token; grows."""
        placement = assignment.placement
        self.error: TandemError | None = None
        self.culprit: Incarnation | None = None
        self.cached_tokens = 0
        self._rooms = rooms
        self._assignment = assignment
        self._spec = spec
        self._times_s = times_s
        self._decode = rooms.named[placement.decode.worker_id]
        self._prefill = None if placement.prefill is None else rooms.named[placement.prefill.worker_id]
        self._has_arrived = placement.prefill is None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns once all tokens are there; sets `error` if that will not be."""
        spec, placement = self._spec, self._assignment.placement
        self._decode.ports[self] = None  # its loss ends the wait in the prefill worker's line at once
        if self._prefill is None:
            self._reserve(local=True, most=placement.max_local_tokens)
        else:
            destination = placement.decode.worker_id
            self._ask(self._prefill, lambda core: core.prefill(self, _HANDLE, spec, destination))
        await self._ended

    def release(self) -> None:
        """Nothing more is wanted of either worker."""
        for worker in {id(each): each for each in (self._decode, self._prefill) if each is not None}.values():
            if self in worker.ports and worker.is_up:
                worker.ask(self, lambda core: core.release(self, _HANDLE))
            worker.leave(self)
        self._rooms.workers.end(self._assignment, arrived=self._has_arrived)

    def lost(self, incarnation: Incarnation) -> None:
        """Notes that a worker of the pair is lost."""
        self._fail(Unavailable("a worker was lost"), incarnation)

    def _ask(self, worker: SimulatedWorker, what: _Ask) -> None:
        def ask(core: Worker) -> None:
            try:
                what(core)
            except TandemError as error:
                self._fail(error, worker.info.incarnation)

        worker.ask(self, ask)

    def _reserve(self, *, local: bool, most: int | None = None) -> None:
        if self.error is None and self._decode.is_up:
            spec = self._spec
            self._ask(self._decode, lambda core: core.reserve(self, _HANDLE, spec, local, most))

    def _fail(self, error: TandemError, culprit: Incarnation | None = None) -> None:
        if self.error is None and not self._ended.done():
            self.error, self.culprit = error, culprit
            self._ended.set_result(None)

    # --- what the workers tell (RouterPort) ---

    def prefill_started(self, handle: Handle) -> None:
        """Its turn has come: room is asked for."""
        self._later(self._reserve_remote)

    def _reserve_remote(self) -> None:
        self._reserve(local=False)

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        """The decode worker made room."""
        prefill = self._prefill
        if prefill is not None:
            self._later(lambda: self._grant(prefill, ticket, kv_endpoint))

    def _grant(self, prefill: SimulatedWorker, ticket: bytes, endpoint: bytes) -> None:
        if self.error is None and prefill.is_up and self in prefill.ports:
            self._ask(prefill, lambda core: core.grant(self, _HANDLE, ticket, endpoint))

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        """The prompt is computed."""
        self.cached_tokens = cached_tokens

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Not asked for."""

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        """Reaches the client two messages later."""
        if self.error is None:
            self._times_s.append(self._rooms.clock.now_s() + 2 * self._rooms.message_s)
            if finish_reason is not None and not self._ended.done():
                self._ended.set_result(None)

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        """Notes that the decode worker has the prompt's KV."""
        if self.error is None and not self._has_arrived:
            self._has_arrived = True
            self._rooms.workers.arrive(self._assignment)
            self._rooms.workers.handed_off(self._assignment, seconds)

    def leaving(self, handle: Handle) -> None:
        """Ignores the notice: nobody drains, and overload is what is studied."""

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        """Patience has no end here."""

    def failed(self, handle: Handle, error: TandemError) -> None:
        """Tries the request elsewhere."""
        self._fail(error)

    def _later(self, what: _Then) -> None:
        asyncio.get_running_loop().call_later(self._rooms.message_s, what)


async def serve(rooms: Rooms, ask: Ask, number: int) -> Outcome:
    """From its due arrival to its end."""
    request = _Request(rooms, ask, number)
    await asyncio.sleep(rooms.message_s)
    deadline = Deadline.after(rooms.clock, None)
    try:
        async with rooms.admission.slot(ask.prompt_tokens, 0, deadline):
            failed = not await request.run()
    except TandemError:  # there is no room to wait in
        failed = True
    return request.outcome(failed=failed)


class _Request:
    """A request with all its tries."""

    def __init__(self, rooms: Rooms, ask: Ask, number: int) -> None:
        self._rooms = rooms
        self._ask = ask
        self._number = number
        self._times_s: array[float] = array("d")
        self._blamed: set[Incarnation] = set()
        self._trusts_held = True
        self._replays = 0
        self._cached_tokens = 0

    async def run(self) -> bool:
        """Whether all tokens came."""
        prompt = self._ask.token_ids()
        tries_left = MAX_TRIES
        while tries_left:
            num_before = len(self._times_s)
            emitted = (OUTPUT_TOKEN,) * num_before
            try:
                assignment = await self._rooms.workers.place(self._demand(prompt + emitted), MOST_WAIT_S)
            except Unavailable:
                return False
            self._rooms.placements[assignment.placement.reason] += 1
            spec = GroupSpec(
                RequestId(str(self._number)),
                prompt,
                SamplingParams(max_tokens=self._ask.output_tokens, temperature=0.0),
                (ChoiceSpec(0, emitted),),
            )
            attempt = Attempt(self._rooms, assignment, spec, self._times_s)
            try:
                await attempt.run()
            finally:
                attempt.release()
            self._cached_tokens = max(self._cached_tokens, attempt.cached_tokens)
            if attempt.error is None:
                return True
            tries_left = MAX_TRIES if len(self._times_s) > num_before else tries_left - 1
            self._learn(attempt)
        return False

    def outcome(self, *, failed: bool) -> Outcome:
        """Returns the outcome over all tries."""
        ask, times_s = self._ask, self._times_s
        return Outcome(
            at_s=ask.at_s,
            prompt_tokens=ask.prompt_tokens,
            output_tokens=len(times_s),
            ttft_s=times_s[0] - ask.at_s if times_s else None,
            itl_s=gap_p95(times_s),
            ended_s=times_s[-1] if times_s else self._rooms.clock.now_s(),
            failed=failed,
            replays=self._replays,
            cached_tokens=self._cached_tokens,
        )

    def _demand(self, tokens: tuple[TokenId, ...]) -> Demand:
        return Demand(
            num_tokens=len(tokens),
            max_total_tokens=self._ask.prompt_tokens + self._ask.output_tokens,
            num_prompt_tokens=self._ask.prompt_tokens,
            blamed=frozenset(self._blamed),
            prefix=Prefix("", tokens),
            local_if_held=self._trusts_held,
        )

    def _learn(self, attempt: Attempt) -> None:
        if isinstance(attempt.error, PrefixNotHeld):
            self._trusts_held = False
            return
        self._replays += 1
        self._trusts_held = True
        if attempt.culprit is not None:
            self._blamed.add(attempt.culprit)
