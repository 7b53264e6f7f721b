"""Prompts that a worker computes for others beside its own decodes: in line, in its batch, on their way.

    Prefill ─▶ line ─start─▶ batch: PrefillStarted, chunks ─▶ computed: PrefillDone, first tokens ─▶ HandoffDone
                               └─ Grant: transfer opens, finished blocks are pushed ─────────────┘

To the router it looks as on a prefill worker. A prompt starts with all its blocks, found in the cache or allocated. In
the batch it takes no seat and is never preempted; once computed, it leaves the batch, and its blocks stay lent to the
transfer until they are pushed.

Shares of the pool. All these prompts together hold at most `SHARE` of it; a longer one starts when no other one holds
any. The first in line waits for room, and while it does, no reservation is admitted before it, so that what runs here
ends and makes that room; but a reservation that was overtaken often enough goes before all prompts.

INVARIANT: no deadlock between workers that compute for each other. A prompt in the batch has all that it needs, so it
is computed. Then it waits for its Grant: for a reservation elsewhere, which may wait for prompts that wait for a
reservation here. What was granted is pushed in bounded time. So if a worker can do nothing more, and something lacks
room there, then for prompts that are computed and not granted: `give_up_one` fails the last of them, once that has
lasted for `PATIENCE_S`, and its router goes on from its first tokens with other workers. Each time that happens the
request has come further, so it ends. Checked by `tests/integration/test_elastic_pairs.py`.

All on the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from decode_worker.patience import Patience
from decode_worker.running_batch import RunningBatch
from engine.beam_group import candidates_of
from engine.prefix_cache import PrefixCache
from engine.step import SampledToken
from kvtransfer.base import Sender, TransferReport
from shell.clock import Clock
from shell.telemetry.events import Transferred
from tandem.errors import Overloaded, TandemError
from tandem.first_tokens import encode_first_tokens
from tandem.types import WaitReason
from worker.outgoing_transfer import OutgoingPolicy, OutgoingTransfer
from worker.request import Request
from worker.turns import turn_of
from worker.waits import Wait

SHARE = 0.5
"""Of the pool, that all prompts for others may hold together."""
PATIENCE_S = 1.0
"""How long nothing can go on before a computed prompt that waits for its grant is given up."""


class PromptOwner(Protocol):
    """The worker."""

    def prompt_ended(self, request: Request, error: TandemError | None) -> None:
        """It was handed over, or its first tokens ended it (None); or it failed. Forgets it."""

    def prompt_blocks_returned(self) -> None:
        """There may be room, and `is_settled` may have changed."""


class PromptsForOthers:
    """Those of one worker. An `OutgoingOwner`."""

    def __init__(
        self, batch: RunningBatch, cache: PrefixCache, sender: Sender | None, clock: Clock, owner: PromptOwner
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._sender = sender
        self._clock = clock
        self._owner = owner
        self._max_held = int(cache.pool.num_blocks * SHARE)
        self._line: list[Request] = []
        self._transfers: dict[Request, OutgoingTransfer] = {}
        """One per request here, and those of ended ones whose blocks the sender still uses."""
        self._live: dict[Request, None] = {}
        """All that have not ended, in order of arrival."""
        self._patience = Patience(PATIENCE_S)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_in_line(self) -> int:
        """Those without blocks."""
        return len(self._line)

    @property
    def num_computing(self) -> int:
        """Those in the batch."""
        return sum(request in self._batch for request in self._live)

    @property
    def num_tokens_in_line(self) -> int:
        """Tokens to compute of those without blocks."""
        return sum(request.group.prefix.num_remaining_tokens for request in self._line)

    @property
    def num_transfers(self) -> int:
        """Hand-offs that were granted and have not ended."""
        return sum(transfer.is_granted for transfer in self._transfers.values())

    @property
    def is_settled(self) -> bool:
        """Whether none is here, and no block is lent to the sender."""
        return not self._live and not self._transfers

    # --- from the worker ---

    def add(self, request: Request) -> None:
        """A new one; `enter` follows. Nothing can be handed over without a sender, which the owner checks."""
        assert self._sender is not None
        request.for_another = True
        transfer = OutgoingTransfer(request, self._sender, self._cache.pool, OutgoingPolicy(), self)
        self._live[request] = None
        self._transfers[request] = transfer
        transfer.start()

    def enter(self, request: Request) -> None:
        """Puts it in line."""
        self._line.append(request)
        if request.reads_cache:
            request.group.prefetch(self._cache)

    def grant(self, request: Request, ticket: bytes, kv_endpoint: bytes) -> None:
        """Lets its transfer open."""
        self._transfers[request].grant(ticket, kv_endpoint)

    def first_in_line(self) -> Request | None:
        """The one that starts next, unless it must wait for others of its kind to give back blocks."""
        first = min(self._line, key=lambda each: turn_of(each, each.group.prefix.num_remaining_tokens), default=None)
        if first is None:
            return None
        held = self._num_held_blocks()
        return first if not held or held + self.num_blocks(first) <= self._max_held else None

    def num_blocks(self, request: Request) -> int:
        """Blocks that its whole prompt takes, before it has any."""
        prefix = request.group.prefix
        return prefix.blocks_wanted(prefix.num_remaining_tokens, self._cache.pool.block_size)

    def fits(self, request: Request, num_blocks: int) -> bool:
        """Whether it can start with so many available blocks."""
        missing = self.num_blocks(request) - num_blocks
        if missing <= 0 or not request.reads_cache:
            return missing <= 0
        return missing <= self._cache.num_held(request.spec.cache_salt, request.group.prefix.token_ids)

    def start(self, request: Request) -> None:
        """It takes all its blocks and joins the batch; it fits."""
        self._line.remove(request)
        if request.reads_cache:
            request.group.attach(self._cache)
        request.group.prefix.add_blocks(self._cache.allocate(self.num_blocks(request)))
        self._batch.join(request)

    def waits(self, *, line_moves: bool) -> Iterator[Wait]:
        """Every one of them: none has more to say before it ends; those in line only if that moves."""
        for request in self._live:
            if request in self._batch:
                yield request, WaitReason.PROMPT
            elif request.started_s is not None:
                yield request, WaitReason.HANDOFF if self._transfers[request].is_granted else WaitReason.GRANT
            elif line_moves:
                yield request, WaitReason.PREFILL_LINE

    def give_up_one(self, *, is_stalled: bool) -> None:
        """Called at intervals, with whether something lacks room and nothing goes on: see the module's docstring."""
        waiting = [each for each in self._live if each.started_s is not None and each not in self._batch]
        stands_still = is_stalled and bool(waiting) and not self.num_transfers
        if self._patience.is_over(self._clock.now_s(), stands_still=stands_still):
            last = max(waiting, key=lambda each: each.rank)
            self._owner.prompt_ended(last, Overloaded("its KV blocks are needed before it can be handed over"))

    def forget(self, request: Request) -> None:
        """It has ended. Idempotent; a transfer under way is given up."""
        if request in self._live:
            del self._live[request]
            if request in self._line:
                self._line.remove(request)
            self._transfers[request].abort()

    def _num_held_blocks(self) -> int:
        """One that is shared counts for each holder."""
        computing = sum(len(each.group.prefix.block_table) for each in self._live)
        return computing + sum(each.num_lent for request, each in self._transfers.items() if request not in self._batch)

    # --- from the step loop ---

    def started(self, request: Request) -> None:
        """Its first chunk is about to be computed: its router finds room for it now."""
        request.router.prefill_started(request.handle)
        if request.group.prefix.num_cached_tokens:
            self.chunk_computed(request)

    def chunk_computed(self, request: Request, drawn: list[tuple[SampledToken, ...]] | None = None) -> None:
        """Lends the blocks that are filled to the end and in place: the next chunk will not touch them.

        `drawn`: after the last chunk, per drawer of the prefix one token, or the candidates of a beam search.
        """
        if drawn is not None:
            self._computed(request, drawn)
            return
        prefix = request.group.prefix
        full = prefix.block_table[: prefix.num_ended_tokens // self._cache.pool.block_size]
        self._transfers[request].lend(self._cache.num_loaded(full))

    def _computed(self, request: Request, drawn: list[tuple[SampledToken, ...]]) -> None:
        """All of it has KV: tells the first tokens at once, and hands over the rest, unless they end every choice.

        Candidates of a beam search go with the hand-off.
        """
        prefix = request.group.prefix
        request.owes_prefill_done = False
        request.prompt_computed(self._clock.now_s())
        if request.spec.sampling.beam_width:
            payload = encode_first_tokens(candidates_of(drawn[0]))
        else:
            first = {each.index: token for each, (token,) in zip(prefix.drawers, drawn, strict=True)}
            for choice in prefix.drawers:
                request.take_token(choice, first[choice.index])
            payload = encode_first_tokens({index: token.token_id for index, token in first.items()})
        if request.group.is_finished:
            self._owner.prompt_ended(request, None)
            return
        self._transfers[request].finish(len(prefix.block_table), payload)
        self._batch.leave(request)

    # --- from transfers (OutgoingOwner) ---

    def transfer_committed(self, request: Request, report: TransferReport) -> None:
        """The other worker has all of it."""
        if request not in self._live:
            return  # it was released just now
        request.router.handoff_done(request.handle, report.num_bytes, report.seconds)
        request.events.emit(Transferred(report.num_bytes, report.seconds, report.transport))
        self._owner.prompt_ended(request, None)

    def request_failed(self, request: Request, error: TandemError) -> None:
        """See `OutgoingOwner`."""
        self._owner.prompt_ended(request, error)

    def blocks_returned(self, request: Request) -> None:
        """See `OutgoingOwner`."""
        if self._transfers[request].has_ended:
            del self._transfers[request]
        self._owner.prompt_blocks_returned()
