"""One try of one sequence on one pair of workers: two legs, released on every way out.

    reserve ──Reserved──▶ prefill ──first token──▶ decode ──last token──▶ ended
       └──────────────────────┴──────────────────────┴──▶ failed (by one leg, the culprit)

With local prefill there is one leg, on the decode worker. Tokens go straight to the sink, from
within the worker's stream; the attempt's own coroutine wakes only when the stage changes.

Every wait ends: by the worker's word, by the loss of its stream or its lease, or by silence. In
reserve and prefill the sequence may stand in the line of a healthy worker, for any time: there,
silence is that of the engine, and what ends the wait at last is the request's deadline
(`Patience.total_s` where it brings none). Once the first token is known it is the sequence's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.placement import Placement
from router.worker_link import WorkerLink
from tandem.clock import Clock
from tandem.errors import Reason, TandemError, TransferError, Unavailable
from tandem.lifecycle import RequestState
from tandem.telemetry.observers import RequestListener
from tandem.types import Handle, SequenceSpec, TokenDelta, WorkerInfo

_OTHER_WORD_S = 0.1
"""How long one worker's word waits for the other's: on how large a hand-off was, or why it failed."""


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

    def engine_steps(self, info: WorkerInfo) -> int | None:
        """Steps that its engine has made, as last heard; None if it is gone or was never heard."""
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

        `silence_s`: longest silence before the sequence is given up (see the module).
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
        self._attached = False
        self._error: TandemError | None = None
        self._culprit: WorkerInfo | None = None

    @property
    def culprit(self) -> WorkerInfo | None:
        """Whose failure ended the attempt."""
        return self._culprit

    async def run(self, spec: SequenceSpec) -> None:
        """Returns when the sink is finished. Raises what a leg failed with, Unavailable on silence."""
        try:
            await self._walk(spec)
        except TransferError as failure:
            cause = await self._cause_of(failure)
            if not self._sink.finished:
                raise cause from None

    async def _walk(self, spec: SequenceSpec) -> None:
        self._on_stage(RequestState.RESERVING)
        self._sent_s = self._clock.now_s()
        self._decode.reserve(spec, local_prefill=self._prefill is None)
        if self._prefill is not None:
            ticket, kv_endpoint = await self._grant()
            self._sent_s = self._clock.now_s()
            self._prefill.prefill(spec, ticket, kv_endpoint)
        self._on_stage(RequestState.PREFILLING)
        await self._until(lambda: self._sink.finished or self._first_is_known)
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
                async with asyncio.timeout(self._heard_s + self._silence_s - self._clock.now_s()):
                    await self._news.wait()
            except TimeoutError:
                self._check_silence()

    def _check_silence(self) -> None:
        silent_s = self._clock.now_s() - self._heard_s
        if silent_s < self._silence_s:
            return
        leg = self._next_to_speak()
        if not self._first_is_known and leg.engine_moved():
            self._hear(wake=False)
            return
        self._culprit = leg.info
        raise Unavailable(f"worker {leg.info.worker_id} said nothing for {silent_s:.0f} s")

    def _next_to_speak(self) -> _Leg:
        if self._prefill is None or self._attached or self._granted is None:
            return self._decode
        return self._prefill

    async def _cause_of(self, failure: TransferError) -> TandemError:
        """A hand-off also fails for what the other worker is about to say of itself: then that is the attempt's end."""
        try:
            async with asyncio.timeout(_OTHER_WORD_S):
                while isinstance(self._error, TransferError) and (self._decode.is_open or self._prefill_is_open):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        return self._error or failure

    async def _hear_of_handoff(self) -> None:
        """Decoded tokens prove that the hand-off is over; the word of its size may be a moment behind."""
        if not self._attached:
            return
        try:
            async with asyncio.timeout(_OTHER_WORD_S):
                await self._until(lambda: not self._prefill_is_open)
        except (TimeoutError, TandemError):
            return

    @property
    def _prefill_is_open(self) -> bool:
        return self._prefill is not None and self._prefill.is_open

    @property
    def _first_is_known(self) -> bool:
        return self._sink.num_tokens_in_order > self._first_offset

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
        self._attached = True
        self._hear(wake=True)

    def on_tokens(self, delta: TokenDelta) -> None:
        """Decode makes tokens: it holds the KV."""
        self._attached = True
        self._sink.push(delta)
        self._hear(wake=self._sink.finished)

    def on_failed(self, leg: _Leg, error: TandemError) -> None:
        """A leg ended. Prefill's end no longer matters once decode holds the KV and the first token is known.

        That a hand-off failed gives way to what the other leg says of itself.
        """
        harmless = self._sink.finished or (leg is self._prefill and self._attached and self._first_is_known)
        is_cause = isinstance(self._error, TransferError) and not isinstance(error, TransferError)
        if not harmless and (self._error is None or is_cause):
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
        self._links = links
        self._link = links.link(info)
        self._engine_steps = links.engine_steps(info)
        self._handle: Handle | None = None
        self.info = info
        self.is_open = False
        """Whether a word of its worker may still come that the attempt waits for."""

    def reserve(self, spec: SequenceSpec, *, local_prefill: bool) -> None:
        link = self._open()
        if link is not None:
            self._handle = link.reserve(spec, self, local_prefill=local_prefill)

    def prefill(self, spec: SequenceSpec, ticket: bytes, kv_endpoint: bytes) -> None:
        link = self._open()
        if link is not None:
            self._handle = link.prefill(spec, self, ticket, kv_endpoint)

    def engine_moved(self) -> bool:
        """Whether the worker's engine has made steps since this was last asked, or since the attempt began."""
        before, self._engine_steps = self._engine_steps, self._links.engine_steps(self.info)
        return self._engine_steps != before

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
        self.is_open = False
        self._attempt.on_handoff_done(num_bytes, seconds)

    def tokens(self, delta: TokenDelta) -> None:
        self._attempt.on_tokens(delta)

    def failed(self, error: TandemError) -> None:
        self.is_open = False
        self._attempt.on_failed(self, error)
