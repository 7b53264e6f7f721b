"""Running requests on their way to another decode worker, with their KV: all of a worker that drains, and one at a time
of a worker that is overloaded, in whose pool requests are preempted often. One preemption is no sign of overload: it is
how a pool is kept full. Many preemptions cost what was computed.

    running ──tell──▶ offered to its router, still running
       └──begin──▶ suspended: no new step ──steps in flight have ended──▶ its blocks are pushed ──▶ committed: gone
                                                                      └──▶ failed: its router is told, and replays it

Only what a transfer can carry may leave: no beams, all KV here. The blocks that are pushed hold what the other worker
asked for: of one choice the prompt and what is known of its completion, of several the prompt alone, once. The tokens
behind what is known go with the commit; their KV, and that of several choices' completions, is computed there. Tokens
of steps that were in flight are told as ever, before the end of the move is.

The request stays in the batch, and holds its blocks, until the owner ends it. The worker stays until the router has
released what has moved: a worker that left sooner could take the last word on it, HandoffDone, with it.
Of an overloaded worker the first in rank goes: it is never preempted, so it is still here when another one has made
room, and those behind it get its blocks. Its router leaves it here unless another worker has room to spare.
All on the loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from decode_worker.running_batch import RunningBatch
from engine.prefix_cache import PrefixCache
from kvtransfer.base import Sender, TransferReport
from prefill_worker.outgoing_transfer import OutgoingTransfer
from shell.telemetry.events import Moved, Transferred
from tandem.errors import FrameError, InvalidRequest, Reason, TandemError, Unavailable
from tandem.first_tokens import FirstTokens, NextTokens, encode_first_tokens
from tandem.types import Handle, MoveReason
from worker.ports import Destination, RouterPort
from worker.request import Request
from worker.tuning import FULL_SHARE, MANY_PREEMPTIONS, OVERLOAD_S, STAY_S


class Moves:
    """The moves of a worker's requests. An `OutgoingOwner`."""

    def __init__(
        self,
        batch: RunningBatch,
        cache: PrefixCache,
        sender: Sender | None,
        end: Callable[[Request, TandemError | None], None],
        on_returned: Callable[[], None],
    ) -> None:
        """`end` is called once for each that has left (None) or failed, unless it was forgotten before.

        `on_returned`: blocks came back, and `is_settled` may have changed.
        """
        self._batch = batch
        self._cache = cache
        self._sender = sender
        self._end = end
        self._on_returned = on_returned
        self._told: set[Request] = set()
        """Requests that may leave, as their routers know."""
        self._num_preemptions = 0
        """Preemptions that were seen."""
        self._preempted_s: deque[float] = deque(maxlen=MANY_PREEMPTIONS)
        """When the newest ones were seen."""
        self._reason = MoveReason.OVERLOAD
        self._offers_from_s = -math.inf
        """When an overloaded worker may offer a request again."""
        self._stay_until_s: dict[Request, float] = {}
        """Requests that moved to here."""
        self._suspended: dict[Request, Destination] = {}
        """Who waits for the end of their steps."""
        self._transfers: dict[Request, OutgoingTransfer] = {}
        """Transfers under way, and transfers of ended requests whose blocks the sender still uses."""
        self._unreleased: set[tuple[RouterPort, Handle]] = set()
        """Requests that have moved, and whose routers may not know that yet."""

    def __iter__(self) -> Iterator[Request]:
        """Requests that are moving."""
        yield from self._suspended
        yield from (request for request in self._transfers if request in self._batch)

    @property
    def is_settled(self) -> bool:
        """Whether no block is lent to the sender, and every router knows what became of its requests."""
        return not self._transfers and not self._unreleased

    def pushes(self, request: Request) -> bool:
        """Whether the request has left, or was about to leave and went on elsewhere."""
        return request in self._transfers

    def tell(self, requests: Iterable[Request], *, again: bool = False) -> None:
        """Drains: tells the routers of those that may leave, once; `again`: also of those they were told of."""
        if again or self._reason is not MoveReason.DRAIN:
            self._told.clear()
        self._reason = MoveReason.DRAIN
        for request in requests:
            if request not in self._told and self._may_leave(request):
                self._offer(request)

    def relieve(self, requests: Iterable[Request], now_s: float) -> None:
        """To be called often: while there is too much here, tells the router of one that may leave, in turn, unless
        one is on its way or was told of just now.
        """
        is_overloaded = self._is_overloaded(now_s)
        if not is_overloaded or self._suspended or self._transfers or now_s < self._offers_from_s:
            return
        able = [each for each in requests if now_s >= self._stay_until_s.get(each, now_s) and self._may_leave(each)]
        if self._told.issuperset(able):
            self._told.clear()
        first = min((each for each in able if each not in self._told), key=lambda each: each.rank, default=None)
        if first is not None:
            self._offers_from_s = now_s + OVERLOAD_S
            self._offer(first)

    def _is_overloaded(self, now_s: float) -> bool:
        """Returns whether requests were preempted often in a short time, and there is little room by now."""
        num_new = self._batch.num_preemptions - self._num_preemptions
        self._num_preemptions += num_new
        self._preempted_s.extend([now_s] * min(num_new, MANY_PREEMPTIONS))
        is_often = len(self._preempted_s) == MANY_PREEMPTIONS and self._preempted_s[0] >= now_s - OVERLOAD_S
        return is_often and self._cache.num_available < FULL_SHARE * self._cache.pool.num_blocks

    def landed(self, request: Request, first_tokens: FirstTokens, now_s: float) -> None:
        """The request's KV arrived here; a request that moved is to stay for a while."""
        if isinstance(first_tokens, NextTokens):
            self._stay_until_s[request] = now_s + STAY_S

    def _offer(self, request: Request) -> None:
        self._told.add(request)
        request.router.leaving(request.handle)

    def begin(self, request: Request, to: Destination) -> None:
        """Suspends it; the rest follows. A no-op if it is suspended already.

        Raises Unavailable if it cannot leave, InvalidRequest if there is no such choice, or no token of one behind what
        is known there.
        """
        if request in self._suspended or request in self._transfers:
            return
        if not self._may_leave(request):
            raise Unavailable("its KV is not here: it goes on elsewhere from its tokens", Reason.DRAINING)
        going = [each for each in request.group.sequences if each.index in to.choices]
        if not going or len(going) < len(to.choices):
            raise InvalidRequest("hand_over.choices", "they are not choices of this request")
        if any(to.num_output_tokens >= each.num_output_tokens for each in going):
            raise InvalidRequest("hand_over.output_tokens", "there is no token behind them")
        self._batch.suspend(request)
        self._suspended[request] = to
        self.steps_ended()

    def steps_ended(self) -> None:
        """Pushes the requests that no step in flight computes."""
        for request in tuple(self._suspended):
            if not any(each.num_pending_tokens for each in request.group.running):
                self._push(request, self._suspended.pop(request))

    def released(self, router: RouterPort, handle: Handle | None = None) -> None:
        """The router knows what became of it; None = of all its requests, or it is gone. Idempotent."""
        known = {each for each in self._unreleased if each[0] is router and handle in {None, each[1]}}
        if known:
            self._unreleased -= known
            self._on_returned()

    def forget(self, request: Request) -> None:
        """Forgets an ended request. Idempotent; a transfer under way is given up."""
        self._told.discard(request)
        self._stay_until_s.pop(request, None)
        self._suspended.pop(request, None)
        if request in self._transfers:
            self._transfers[request].abort()

    def _may_leave(self, request: Request) -> bool:
        """Whether all KV but that of each choice's last token is here, or comes with the steps in flight."""
        group = request.group
        if self._sender is None or request not in self._batch or request.spec.sampling.beam_width:
            return False
        return (
            group.is_forked and not group.is_finished and all(each.num_remaining_tokens == 1 for each in group.running)
        )

    def _push(self, request: Request, to: Destination) -> None:
        """INVARIANT: nothing writes into its blocks from here on: it is in no step (test_moves)."""
        going = [each for each in request.group.sequences if each.index in to.choices]
        bearer = next((each for each in going if not each.is_finished), None)
        num_tokens = request.spec.num_prompt_tokens + (to.num_output_tokens if len(going) == 1 else 0)
        num_blocks = -(-num_tokens // self._cache.pool.block_size)
        if bearer is None or self._cache.num_loaded(bearer.block_table[:num_blocks]) < num_blocks:
            self._end(request, Unavailable("its KV is not in place", Reason.DRAINING))
            return
        try:
            tokens = encode_first_tokens(
                NextTokens({each.index: each.output_token_ids[to.num_output_tokens :] for each in going})
            )
        except FrameError as error:
            self._end(request, Unavailable(f"it has come too far since it was told to leave: {error}", Reason.DRAINING))
            return
        assert self._sender is not None  # else nothing may leave
        transfer = OutgoingTransfer(request, self._sender, self._cache.pool, self)
        self._transfers[request] = transfer
        transfer.start()
        transfer.grant(to.ticket, to.kv_endpoint)
        transfer.finish(num_blocks, tokens, bearer)

    # --- from transfers (OutgoingOwner) ---

    def transfer_committed(self, request: Request, report: TransferReport) -> None:
        """The other worker has the request."""
        if request not in self._batch:
            return  # it was released just now
        self._unreleased.add((request.router, request.handle))
        request.router.handoff_done(request.handle, report.num_bytes, report.seconds, report.route)
        request.events.emit(Transferred(report.num_bytes, report.seconds, report.transport, report.num_spans))
        request.events.emit(Moved(self._reason))
        self._preempted_s.clear()  # a stream has moved: what was seen before says nothing any more
        self._end(request, None)

    def request_failed(self, request: Request, error: TandemError) -> None:
        """The request is not there, and goes on elsewhere from its tokens."""
        self._end(request, error)

    def blocks_returned(self, request: Request) -> None:
        """See `OutgoingOwner`."""
        if self._transfers[request].has_ended:
            del self._transfers[request]
        self._on_returned()
