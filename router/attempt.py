"""One try of one sequence on one pair of workers: two legs, released on every way out.

    reserve ──Reserved──▶ prefill ──first token──▶ decode ──last token──▶ ended
       └──────────────────────┴──────────────────────┴──▶ failed (by one leg, the culprit)

With local prefill there is one leg, on the decode worker. Tokens go straight to the sink, from
within the worker's stream; the attempt's own coroutine wakes only when the stage changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.placement import Placement
from router.worker_link import WorkerLink
from tandem.clock import Clock
from tandem.errors import Reason, TandemError, Unavailable
from tandem.lifecycle import RequestState
from tandem.telemetry.observers import RequestListener
from tandem.types import Handle, SequenceSpec, TokenDelta, WorkerInfo

_HANDOFF_WORD_S = 0.1
"""How long the end of a short completion waits for the figures of a hand-off that is over."""


class Sink(Protocol):
    """Takes one sequence's tokens, in any order."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is wanted."""
        ...

    @property
    def num_tokens_in_order(self) -> int:
        """Completion tokens known without a gap."""
        ...

    def push(self, delta: TokenDelta) -> None:
        """Takes tokens."""
        ...


class Links(Protocol):
    """Where streams to workers are found."""

    def link(self, info: WorkerInfo) -> WorkerLink | None:
        """The stream to this life of a worker; None if it is gone."""
        ...


class Attempt:
    """Await `run`, then call `release` whatever happened."""

    def __init__(
        self,
        placement: Placement,
        links: Links,
        sink: Sink,
        observer: RequestListener,
        clock: Clock,
        arrived_s: float,
        silence_s: float,
        on_stage: Callable[[RequestState], None],
    ) -> None:
        """`arrived_s`: when the request came, on `clock`.

        `silence_s`: longest time without a word about this sequence before it is given up.
        """
        self._sink = sink
        self._observer = observer
        self._clock = clock
        self._arrived_s = arrived_s
        self._silence_s = silence_s
        self._on_stage = on_stage
        self._decode = _Leg(self, placement.decode, links)
        self._prefill = None if placement.prefill is None else _Leg(self, placement.prefill, links)
        self._news = asyncio.Event()
        self._heard_s = clock.now_s()
        self._sent_s = 0.0
        self._first_offset = sink.num_tokens_in_order
        self._granted: tuple[bytes, bytes] | None = None
        self._handed_over = False
        self._attached = False
        self._error: TandemError | None = None
        self._culprit: WorkerInfo | None = None

    @property
    def culprit(self) -> WorkerInfo | None:
        """Whose failure ended the attempt."""
        return self._culprit

    async def run(self, spec: SequenceSpec) -> None:
        """Returns when the sink is finished. Raises what a leg failed with, Unavailable on silence."""
        self._on_stage(RequestState.RESERVING)
        self._sent_s = self._clock.now_s()
        self._decode.reserve(spec, local_prefill=self._prefill is None)
        if self._prefill is not None:
            ticket, kv_endpoint = await self._grant()
            self._sent_s = self._clock.now_s()
            self._prefill.prefill(spec, ticket, kv_endpoint)
        self._on_stage(RequestState.PREFILLING)
        await self._until(lambda: self._sink.finished or self._sink.num_tokens_in_order > self._first_offset)
        if not self._sink.finished:
            self._on_stage(RequestState.DECODING)
            await self._until(lambda: self._sink.finished)
        await self._hear_of_handoff()

    def release(self) -> None:
        """Lets both workers go. Idempotent; no message arrives here afterwards."""
        self._decode.release()
        if self._prefill is not None:
            self._prefill.release()

    async def _grant(self) -> tuple[bytes, bytes]:
        await self._until(lambda: self._granted is not None)
        assert self._granted is not None
        return self._granted

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Waits for a stage. Raises the attempt's error, or Unavailable after too long a silence."""
        while not reached():
            if self._error is not None:
                raise self._error
            self._news.clear()
            try:
                async with asyncio.timeout(self._silence_s):
                    await self._news.wait()
            except TimeoutError:
                self._check_silence()

    def _check_silence(self) -> None:
        silent_s = self._clock.now_s() - self._heard_s
        if silent_s >= self._silence_s:
            self._culprit = self._decode.info
            raise Unavailable(f"worker {self._decode.info.worker_id} said nothing for {silent_s:.0f} s")

    async def _hear_of_handoff(self) -> None:
        """Decoded tokens prove that the hand-off is over; the word of its size may be a moment behind."""
        if self._prefill is None or not self._attached or self._handed_over:
            return
        try:
            async with asyncio.timeout(_HANDOFF_WORD_S):
                await self._until(lambda: self._handed_over or not self._prefill_is_open())
        except (TimeoutError, TandemError):
            return

    def _prefill_is_open(self) -> bool:
        return self._prefill is not None and self._prefill.is_open

    # --- what the legs report, from within the workers' streams ---

    def on_reserved(self, ticket: bytes, kv_endpoint: bytes) -> None:
        """Decode made room."""
        self._granted = (ticket, kv_endpoint)
        self._hear(wake=True)

    def on_prefill_done(self, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        """The first token is known."""
        self._observer.prompt_computed(self._sent_s - self._arrived_s + queue_s, prefill_s)
        self._sink.push(delta)
        self._hear(wake=True)

    def on_handoff_done(self, num_bytes: int, seconds: float) -> None:
        """Decode holds the KV; prefill is out of the game."""
        self._observer.handed_over(num_bytes, seconds)
        self._handed_over = self._attached = True
        self._hear(wake=True)

    def on_tokens(self, delta: TokenDelta) -> None:
        """Decode makes tokens: it holds the KV."""
        self._attached = True
        self._sink.push(delta)
        self._hear(wake=self._sink.finished)

    def on_failed(self, leg: _Leg, error: TandemError) -> None:
        """A leg ended. Prefill's end no longer matters once decode holds the KV and the first token is known."""
        first_is_known = self._sink.num_tokens_in_order > self._first_offset
        harmless = self._sink.finished or (leg is self._prefill and self._attached and first_is_known)
        if not harmless and self._error is None:
            self._error = error
            self._culprit = leg.info
        self._hear(wake=True)

    def _hear(self, *, wake: bool) -> None:
        self._heard_s = self._clock.now_s()
        if wake:
            self._news.set()


class _Leg:
    """The sequence on one of the two workers: a SequenceListener."""

    def __init__(self, attempt: Attempt, info: WorkerInfo, links: Links) -> None:
        self._attempt = attempt
        self._link = links.link(info)
        self._handle: Handle | None = None
        self.info = info
        self.is_open = False

    def reserve(self, spec: SequenceSpec, *, local_prefill: bool) -> None:
        link = self._open()
        if link is not None:
            self._handle = link.reserve(spec, self, local_prefill=local_prefill)

    def prefill(self, spec: SequenceSpec, ticket: bytes, kv_endpoint: bytes) -> None:
        link = self._open()
        if link is not None:
            self._handle = link.prefill(spec, self, ticket, kv_endpoint)

    def release(self) -> None:
        if self._handle is not None and self._link is not None:
            self._link.release(self._handle)
            self._handle = None
        self.is_open = False

    def _open(self) -> WorkerLink | None:
        self.is_open = True
        if self._link is None:
            self.failed(Unavailable(f"worker {self.info.worker_id} was lost", Reason.WORKER_LOST))
        return self._link

    def reserved(self, ticket: bytes, kv_endpoint: bytes) -> None:
        self._attempt.on_reserved(ticket, kv_endpoint)

    def prefill_done(self, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        self._attempt.on_prefill_done(delta, queue_s, prefill_s)

    def handoff_done(self, num_bytes: int, seconds: float) -> None:
        self._attempt.on_handoff_done(num_bytes, seconds)

    def tokens(self, delta: TokenDelta) -> None:
        self._attempt.on_tokens(delta)

    def failed(self, error: TandemError) -> None:
        self.is_open = False
        self._attempt.on_failed(self, error)
