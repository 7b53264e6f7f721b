"""One try of one request on one pair of workers: released on both, on every way out.

    placed ──PrefillStarted──▶ prefilling ──prompt computed──▶ decoding ──last token──▶ ended
                    Reserve ──▶ Reserved ──▶ Grant ──▶ hand-off ┘
       └───────────────────────────┴───────────────────────────┴──▶ failed (by one worker, the culprit)
                                                               └──Leaving──▶ `leaves`: another attempt may take it over

The decode worker is asked for room when the prompt's turn has come, and not before: a prompt that waits in a line holds
no blocks anywhere. With local prefill there is one worker, which decodes; where it was chosen for what its cache holds,
it fails with PrefixNotHeld if that is gone. An attempt that takes over from another one (`source`) has that one's
decode worker in the place of a prefill worker: the KV is there, so Reserve goes out at once, and HandOver takes the
place of Grant. Tokens go straight to the delivery, and Reserve and Grant out, from within the workers' streams; the
attempt's own coroutine wakes only when the stage changes.

Every wait ends: by the worker's word, by the loss of its stream or its lease, or by silence. A request may
wait in a healthy worker for any time, as long as that says so; what ends the wait at last is the request's
deadline. Each worker that holds it is heard for itself: that one speaks is no word of the other.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from router.assignment import Assignment
from router.delivery import Delivery
from router.worker_link import WorkerLink
from router.workers import Workers
from shell.clock import Clock
from shell.telemetry.events import KvArrived, PromptComputed, RequestEvents
from tandem.convert import group_to_proto
from tandem.errors import InvalidOutput, Reason, TandemError, TransferError, Unavailable
from tandem.lifecycle import RequestState
from tandem.types import UNKNOWN_ROUTE, GroupSpec, Handle, KvRoute, TokenDelta, TokenLogprobs, WorkerInfo
from tandem.v1 import worker_pb2

_OTHER_WORD_S = 0.1
"""Longest wait for the other worker's message: on how large a hand-off was, or why it failed."""


class Attempt:
    """Await `run`, then call `release` whatever happened. A GroupListener of both workers."""

    def __init__(
        self,
        assignment: Assignment,
        workers: Workers,
        delivery: Delivery,
        events: RequestEvents,
        clock: Clock,
        arrived_s: float,
        silence_s: float,
        on_stage: Callable[[RequestState], None],
        on_decoded: Callable[[], None],
        source: Attempt | None = None,
    ) -> None:
        """`arrived_s`: when the request came, on `clock`.

        `silence_s`: longest silence before the request is tried elsewhere (see the module). `on_decoded` is called once
        the decode worker did its part well. `source` has the decode worker that is this placement's `prefill`; `run`
        ends it.
        """
        self._assignment = assignment
        self.placement = placement = assignment.placement
        self._source = source
        self._workers = workers
        self._delivery = delivery
        self._events = events
        self._clock = clock
        self._arrived_s = arrived_s
        self._silence_s = silence_s
        self._on_stage = on_stage
        self._on_decoded = on_decoded
        self._decode = _Leg(placement.decode, workers)
        self._prefill = None if placement.prefill is None else _Leg(placement.prefill, workers)
        self._news = asyncio.Event()
        self._sent_s = 0.0
        self._group = worker_pb2.Group()
        """The message that both workers get."""
        self._started = False
        """Whether the prompt's turn has come."""
        self._computed = False
        """Whether the prompt is computed."""
        self._attached = False
        """Whether the decode worker holds the KV."""
        self._arrived = placement.prefill is None
        """Whether the decode worker has said so, or computes the prompt."""
        self._has_decoded = False
        """Whether the decode worker made tokens."""
        self._counts = True
        """Whether the request counts as load of the pair."""
        self._awaited: dict[int, int] = {}
        """Tokens that a choice had before, for each whose next ones the sender of the KV draws and tells."""
        self._offered = False
        """Whether the decode worker would hand the request over."""
        self._moves = False
        """Whether the decode worker of `source` has the order to hand over."""
        self._error: TandemError | None = None
        self.culprit: WorkerInfo | None = None
        """Whose failure ended the attempt."""

    async def run(self, spec: GroupSpec) -> None:
        """Returns when all choices are finished, or when it `leaves`.

        Raises what a worker failed with, Unavailable on silence.
        """
        await self._raising_cause(self._walk(spec))

    async def stay(self) -> None:
        """Goes on with a request that `leaves`, until that is said again. As `run`."""
        self._offered = False
        await self._raising_cause(self._decoded())

    def give_back(self) -> Attempt | None:
        """After a failure: the attempt that this one took over from, if the request runs on there as before."""
        source, leg = self._source, self._prefill
        if source is None or leg is None or leg.link is None or leg.handle is None or self._moves or not leg.is_open:
            return None
        if not leg.link.listen(leg.handle, source):
            return None
        source._decode, self._prefill, self._source = leg, None, None
        self.release()
        return source

    @property
    def leaves(self) -> bool:
        """Whether its decode worker would hand the request over now, each choice with a token at least."""
        if not self._offered or self._prefill_is_open or self._error is not None or self._delivery.finished:
            return False
        return all(each.output_token_ids for each in self._delivery.open_choices)

    async def _raising_cause(self, walk: Awaitable[None]) -> None:
        try:
            await walk
        except TransferError as failure:
            cause = await self._cause_of(failure)
            if not self._delivery.finished:
                raise cause from None

    def went_well(self) -> None:
        """Notes that the request has all that was asked for."""
        if self._arrived and not self._has_decoded:
            self._decode_went_well()

    def release(self) -> None:
        """Both workers free what they hold for it. Idempotent; no message arrives here afterwards."""
        self._release_legs()
        self._uncount()
        if self._source is not None:
            self._source._uncount()

    def _release_legs(self) -> None:
        for leg in filter(None, (self._decode, self._prefill)):
            leg.release()

    def _uncount(self) -> None:
        if self._counts:
            self._counts = False
            self._workers.end(self._assignment, arrived=self._arrived)

    async def _walk(self, spec: GroupSpec) -> None:
        self._group = group_to_proto(spec)
        self._awaited = {} if spec.sampling.beam_width else _drawn_first(spec)
        self._on_stage(RequestState.PLACED)
        self._sent_s = self._clock.now_s()
        if self._source is not None:
            self._take_over(self._source)
        link = self._link_of(self._decode)
        if link is not None:
            self._decode.handle = link.watch(self)  # its loss ends the wait in the prefill worker's line at once
        if self._prefill is None or self._source is not None:
            self._reserve()
        elif self._error is None and (link := self._link_of(self._prefill)) is not None:
            self._open(self._prefill)
            self._prefill.handle = link.prefill(self._group, self, self._decode.info.worker_id)
        await self._until(lambda: self._delivery.finished or self._started or self._computed)
        self._on_stage(RequestState.PREFILLING)
        await self._until(lambda: self._delivery.finished or self._computed)
        if not self._delivery.finished:
            self._on_stage(RequestState.DECODING)
        await self._decoded()

    async def _decoded(self) -> None:
        await self._until(lambda: self._delivery.finished or self.leaves)
        if self._delivery.finished:
            await self._hear_of_handoff()

    def _take_over(self, source: Attempt) -> None:
        """The decode worker of `source` tells this attempt from now on; its prefill worker is released."""
        leg, self._prefill = source._decode, source._decode
        source._decode = _Leg(leg.info, self._workers)
        source._release_legs()
        self._started = self._computed = True
        # More may follow until HandoffDone.
        self._awaited = dict.fromkeys((each.index for each in self._group.choices), sys.maxsize)
        if leg.handle is None or leg.link is None or not leg.link.listen(leg.handle, self):
            self.failed(leg.info, Unavailable(f"worker {leg.info.worker_id} was lost", Reason.WORKER_LOST))

    def _reserve(self) -> None:
        """Asks the decode worker for room; its clock counts what is left by now of the request's time."""
        if self._group.HasField("timeout_seconds"):
            passed_s = self._clock.now_s() - self._sent_s
            self._group.timeout_seconds = max(0.0, self._group.timeout_seconds - passed_s)
        if self._decode.link is not None and self._decode.handle is not None:
            self._open(self._decode)
            self._decode.link.reserve(
                self._decode.handle,
                self._group,
                local_prefill=self._prefill is None,
                max_local_tokens=self.placement.max_local_tokens,
            )

    def _open(self, leg: _Leg) -> None:
        """From now on, a message of the worker is due."""
        leg.is_open = True
        leg.heard_s = self._clock.now_s()

    def _link_of(self, leg: _Leg) -> WorkerLink | None:
        if leg.link is None:
            self.failed(leg.info, Unavailable(f"worker {leg.info.worker_id} was lost", Reason.WORKER_LOST))
        return leg.link

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Waits for a stage. Raises the attempt's error, or Unavailable after too long a silence."""
        while not reached():
            if self._error is not None:
                raise self._error
            self._news.clear()
            try:
                async with asyncio.timeout(self._next_to_speak().heard_s + self._silence_s - self._clock.now_s()):
                    await self._news.wait()
            except TimeoutError:
                self._check_silence()

    def _check_silence(self) -> None:
        leg = self._next_to_speak()
        silent_s = self._clock.now_s() - leg.heard_s
        if silent_s < self._silence_s:
            return
        self.culprit = leg.info
        raise Unavailable(f"worker {leg.info.worker_id} said nothing for {silent_s:.0f} s")

    def _next_to_speak(self) -> _Leg:
        """Returns the leg that was silent for longer, among the legs from which a message is due."""
        if self._prefill is None or self._attached or not self._prefill.is_open:
            return self._decode
        if not self._decode.is_open:
            return self._prefill
        return min(self._prefill, self._decode, key=lambda leg: leg.heard_s)

    async def _cause_of(self, failure: TransferError) -> TandemError:
        """A hand-off also fails for what the other worker is about to say of itself: then that is the attempt's end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OTHER_WORD_S):
                while isinstance(self._error, TransferError) and (self._decode.is_open or self._prefill_is_open):
                    self._news.clear()
                    await self._news.wait()
        return self._error or failure

    async def _hear_of_handoff(self) -> None:
        """Decoded tokens prove that the hand-off is over; the word of its size may be a moment behind."""
        if not self._attached:
            return
        with suppress(TimeoutError, TandemError):
            async with asyncio.timeout(_OTHER_WORD_S):
                await self._until(lambda: not self._prefill_is_open)

    @property
    def _prefill_is_open(self) -> bool:
        return self._prefill is not None and self._prefill.is_open

    # --- what the workers tell, from within their streams ---

    def prefill_started(self, sender: WorkerInfo) -> None:
        """The prompt is being computed: meanwhile, the decode worker makes room for it."""
        if not self._started:
            self._started = True
            self._reserve()
        self._hear(sender, wake=True)

    def reserved(self, sender: WorkerInfo, ticket: bytes, kv_endpoint: bytes) -> None:
        """The decode worker made room."""
        if self._prefill is None:
            self._started = True
        elif self._prefill.handle is not None and self._prefill.link is not None:
            if self._source is None:
                self._prefill.link.grant(self._prefill.handle, ticket, kv_endpoint)
            else:
                self._moves = True
                self._prefill.link.move(self._prefill.handle, self._group.choices, ticket, kv_endpoint)
        self._hear(sender, wake=True)

    def prompt_logprobs(self, sender: WorkerInfo, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """More of the prompt is computed."""
        self._delivery.push_prompt_logprobs(offset, logprobs)
        self._hear(sender, wake=False)

    def prefill_done(self, sender: WorkerInfo, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        """The prompt is computed; first tokens follow for the choices that had none.

        Raises InvalidOutput if more was found in a cache than there is.
        """
        if cached_tokens > (num_prompt_tokens := len(self._group.prompt_token_ids)):
            raise InvalidOutput(f"{cached_tokens} cached tokens of a prompt of {num_prompt_tokens}")
        self._events.emit(PromptComputed(self._sent_s - self._arrived_s + queue_s, prefill_s, cached_tokens))
        self._computed = True
        self._hear(sender, wake=True)

    def handoff_done(self, sender: WorkerInfo, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        """The decode worker holds the KV; from the prefill worker nothing more is awaited."""
        if self._prefill is not None:
            self._prefill.is_open = False
            if self._source is not None:
                self._prefill.release()  # the worker that drains waits for this
        self._awaited.clear()
        self._events.emit(KvArrived(num_bytes, seconds, route))
        self._attached = True
        if not self._arrived:
            self._arrived = True
            if self._source is not None:
                self._source._uncount()
            self._workers.arrive(self._assignment)
            self._workers.handed_off(self._assignment, seconds)
        self._hear(sender, wake=True)

    def tokens(self, sender: WorkerInfo, delta: TokenDelta) -> None:
        """New tokens of one choice: the prompt is computed. A decode worker that makes them holds the KV."""
        are_first_decoded = not self._has_decoded and sender.incarnation == self._decode.info.incarnation
        self._attached = self._attached or are_first_decoded
        was_computed, self._computed = self._computed, True
        self._delivery.push(delta)
        if are_first_decoded:
            self._decode_went_well()
        self._hear(sender, wake=self._delivery.finished or not was_computed)

    def leaving(self, sender: WorkerInfo) -> None:
        """Its decode worker drains, or is overloaded."""
        self._offered = sender.incarnation == self._decode.info.incarnation
        self._hear(sender, wake=True)

    def waiting(self, sender: WorkerInfo) -> None:
        """The worker still holds the request."""
        self._hear(sender, wake=False)

    def failed(self, sender: WorkerInfo, error: TandemError) -> None:
        """A worker ended it. Prefill's end does not matter once decode holds the KV and all first tokens are here."""
        leg = self._leg_of(sender)
        leg.is_open = False
        # That a hand-off failed is replaced by what the other worker says of itself.
        harmless = self._delivery.finished or (leg is self._prefill and self._attached and self._first_tokens_came())
        is_cause = isinstance(self._error, TransferError) and not isinstance(error, TransferError)
        if not harmless and (self._error is None or is_cause):
            self._error = error
            self.culprit = leg.info
        self._hear(sender, wake=True)

    def _decode_went_well(self) -> None:
        self._has_decoded = True
        self._workers.decoded(self.placement.decode)
        self._on_decoded()

    def _first_tokens_came(self) -> bool:
        return all(self._delivery.num_tokens_of(index) > before for index, before in self._awaited.items())

    def _leg_of(self, sender: WorkerInfo) -> _Leg:
        if self._prefill is not None and sender.incarnation == self._prefill.info.incarnation:
            return self._prefill
        return self._decode

    def _hear(self, sender: WorkerInfo, *, wake: bool) -> None:
        self._leg_of(sender).heard_s = self._clock.now_s()
        if wake:
            self._news.set()


def _drawn_first(spec: GroupSpec) -> dict[int, int]:
    drawn = spec.choices if len(spec.choices) == 1 else [each for each in spec.choices if not each.output_token_ids]
    return {each.index: len(each.output_token_ids) for each in drawn}


class _Leg:
    """The request on a worker of its pair."""

    def __init__(self, info: WorkerInfo, workers: Workers) -> None:
        self.info = info
        self.link = workers.link(info)
        self.heard_s = 0.0
        """Time of the worker's last message about the request; from the opening on."""
        self.handle: Handle | None = None
        self.is_open = False
        """Whether the attempt still waits for messages of the worker."""

    def release(self) -> None:
        """Idempotent."""
        if self.handle is not None and self.link is not None:
            self.link.release(self.handle)
        self.handle, self.is_open = None, False
