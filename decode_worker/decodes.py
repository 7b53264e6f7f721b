"""Requests that decode on a worker: admitted, received or computed here, decoded, given to another worker. A `Source`.

    Reserve ─▶ line ──▶ Reserved ─▶ incoming transfer ─▶ batch ─▶ tokens … finish
                           └─ (prompt computed here) ──▶ batch ─▶ PrefillDone, tokens … finish
                                                 └──▶ Leaving ─▶ HandOver ─▶ HandoffDone   it drains, or is overloaded

Plans the steps, in which prompts for other workers are computed too, where the worker is elastic. What a step brought:

    prompt computed ─▶ prefill_done, first tokens of all choices ─▶ fork
    decode          ─▶ one token of one choice, or the candidates of one beam
    last token      ─▶ the choice's blocks are released; with the last choice, the request ends

The cache learns of a prompt's blocks when their step has ended, of a completion's when it ends or is preempted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from decode_worker.incoming_transfers import IncomingTransfers
from decode_worker.moves import Moves
from decode_worker.reservations import Reservations
from decode_worker.running_batch import RunningBatch
from engine.beam_group import BeamGroup, candidates_of
from engine.sequence import Sequence, new_block_table
from engine.step import DrawnTokens, SampledToken
from kvtransfer.base import Receiver, Sender
from prefill_worker.prompts import Prompts
from shell.telemetry.events import BlocksReserved, PrefixLookedUp
from tandem.errors import InvalidRequest, Overloaded, PrefixNotHeld, TandemError
from tandem.first_tokens import FirstTokens
from tandem.types import BlockId, GroupSpec, Handle, WaitReason, WorkerLoad
from worker.admission import Forecast
from worker.budget import ChunkBudget
from worker.ports import Destination, RouterPort, TokenColumns, TokenExtra, WorkerParts
from worker.releases import BlockReleases
from worker.request import Request
from worker.source import BatchedStep, Owner, Pair, Wait


class Decodes:
    """The decodes of a worker. A `DecodeSource`, and a `TransferOwner`."""

    def __init__(
        self,
        parts: WorkerParts,
        receiver: Receiver,
        sender: Sender | None,
        forecast: Forecast,
        budget: ChunkBudget,
        releases: BlockReleases,
        prompts: Prompts,
        owner: Owner,
        *,
        elastic: bool,
    ) -> None:
        """`elastic`: whether `prompts` may have any."""
        self._parts = parts
        self._cache = parts.cache
        self._pool = parts.cache.pool
        self._elastic = elastic
        self._receiver = receiver
        self._budget = budget
        self._prompts = prompts
        self._owner = owner
        self._transfers = IncomingTransfers(parts, receiver, self)
        self._batch = RunningBatch(parts.cache, parts.sizes.max_seqs, forecast, budget, releases, prompts)
        self._reservations = Reservations(parts, forecast, self._batch, self._transfers, prompts)
        self._moves = Moves(self._batch, parts.cache, sender, owner.end, owner.changed)
        self._live: dict[Request, None] = {}
        """Requests that have not ended, in order of arrival."""
        self._draining = False

    @property
    def is_moving(self) -> bool:
        """Whether a hand-off is under way, or a sequence runs."""
        return bool(len(self._transfers) or self._batch.num_running)

    @property
    def is_settled(self) -> bool:
        """Whether no request is here, and every router knows what became of its requests."""
        is_empty = not (self._live or len(self._reservations.line) or len(self._transfers) or len(self._batch))
        return is_empty and self._moves.is_settled

    def add_to(self, load: WorkerLoad) -> WorkerLoad:
        """Returns the load with that of this source; each choice counts as a sequence."""
        batch, budget = self._batch, self._budget
        now = batch.num_decodes, batch.wait_ratio
        queued_tokens = self._reservations.num_tokens_in_line(computed_elsewhere=not self._elastic)
        return replace(
            load,
            running_seqs=load.running_seqs + batch.num_running,
            waiting_seqs=load.waiting_seqs + self._reservations.num_seqs_in_line + batch.num_waiting,
            queued_prompt_tokens=load.queued_prompt_tokens + queued_tokens + batch.num_prompt_tokens_left,
            live_transfers=load.live_transfers + self._receiver.num_live,
            preemptions=batch.num_preemptions,
            prompt_tokens_per_s=budget.prompt_tokens_per_s(*now),
            chunk_tokens=budget.tokens(*now),
        )

    def waits(self, *, line_moves: bool) -> Iterator[Wait]:
        """See `Source`."""
        yield from ((request, WaitReason.HANDOFF) for request in (*self._transfers, *self._moves))
        yield from self._batch.running_waits()
        yield from ((request, WaitReason.ROOM) for request in self._live if request.group.awaits_guides)
        if line_moves:
            yield from ((request, WaitReason.ROOM) for request in self._reservations.line)
            yield from self._batch.line_waits()

    def tick(self) -> None:
        """See `DecodeSource`. Tickets and hand-offs run out; an overloaded worker offers a request to others."""
        self._transfers.expire()
        if (stuck := self._reservations.stuck(self._parts.clock.now_s())) is not None:
            self._owner.end(stuck, Overloaded("others need the KV blocks that it holds while it waits"))
        if self._draining:
            self.drain()
        else:
            self._moves.relieve(self._live, self._parts.clock.now_s())

    def drain(self, *, again: bool = False) -> None:
        """See `DecodeSource`."""
        self._draining = True
        self._moves.tell(self._live, again=again)

    # --- a request's way ---

    def check(self, spec: GroupSpec) -> None:
        """Raises InvalidRequest if the request cannot run here."""
        sizes, validator, pool = self._parts.sizes, self._parts.validator, self._pool
        validator.validate_group(spec, sizes.max_sequence_tokens)
        validator.validate_pool(spec, pool.block_size, pool.num_blocks)
        if spec.num_seqs > sizes.max_seqs:
            raise InvalidRequest(
                f"sampling.{spec.seqs_option}", f"{spec.num_seqs} exceed a batch of {sizes.max_seqs} sequences"
            )

    def add(self, request: Request) -> None:
        """See `Source`."""
        self._live[request] = None

    def enter(self, request: Request) -> None:
        """See `Source`. Raises PrefixNotHeld, Overloaded."""
        self._check_prefix_held(request)
        self._reservations.add(request)
        if request.reads_cache:
            request.group.prefetch(self._cache)

    def admit(self) -> None:
        """See `DecodeSource`."""
        self._moves.steps_ended()
        while (request := self._reservations.next_reservation()) is not None:
            try:
                if request.owes_prefill_done:
                    self._check_prefix_held(request)  # it may have gone while the request was in line
                    self._batch.join(request)
                    request.router.reserved(request.handle)
                else:
                    offer, prefix = self._transfers.offer(request), request.group.prefix
                    request.events.emit(BlocksReserved())
                    request.events.emit(PrefixLookedUp(prefix.num_tokens, prefix.num_cached_tokens))
                    request.router.reserved(request.handle, offer.ticket, offer.endpoint, prefix.num_cached_tokens)
            except TandemError as error:
                self._owner.end(request, error)

    def _check_prefix_held(self, request: Request) -> None:
        """Raises PrefixNotHeld if more would have to be computed here than the request may."""
        if request.max_local_tokens is None:
            return
        group = request.group
        num_tokens = group.num_remaining_tokens
        if request.reads_cache:
            num_tokens -= self._cache.match(request.spec.cache_salt, group.prefix.token_ids)
        if num_tokens > request.max_local_tokens:
            raise PrefixNotHeld(f"{num_tokens} tokens would be computed here, {request.max_local_tokens} may be")

    def move(self, request: Request, to: Destination) -> None:
        """See `DecodeSource`."""
        self._moves.begin(request, to)

    def released(self, router: RouterPort, handle: Handle | None = None) -> None:
        """See `DecodeSource`."""
        self._moves.released(router, handle)

    def forget(self, request: Request, error: TandemError | None) -> None:
        """See `Source`. Blocks are free at once, or when the last step or writer that touches them has stopped."""
        del self._live[request]
        self._transfers.withdraw(request)
        self._moves.forget(request)
        failed = error is not None or self._moves.pushes(request)
        self._reservations.ended(request, in_batch=request in self._batch, failed=failed)
        self._batch.leave(request)
        for table in request.group.take_blocks():  # what it held while the rest was to be received
            self._pool.release(table)

    # --- steps ---

    def next_step(self) -> BatchedStep | None:
        """See `RunningBatch`."""
        return self._batch.next_step()

    def step_behind(self, running: BatchedStep, *, with_prompts: bool) -> BatchedStep | None:
        """See `RunningBatch`."""
        return self._batch.step_behind(running, with_prompts=with_prompts)

    def apply(self, request: Request, seq: Sequence, drawn: list[tuple[SampledToken, ...]]) -> None:
        """See `Source`, and the module's docstring."""
        group = request.group
        ends_prefix = not group.is_forked and (bool(drawn) or seq.is_computed)
        if ends_prefix and request.owes_prefill_done:
            request.owes_prefill_done = False
            request.prompt_computed(self._parts.clock.now_s())
        if drawn:
            self._take(request, seq, drawn)
        if ends_prefix and not group.is_forked:
            group.fork(self._pool)
            group.follow(self._cache)
        self._settle(request, seq)

    def apply_rows(self, batched: BatchedStep, drawn: DrawnTokens) -> Collection[Request]:
        """See `DecodeSource`. Each router is sent all tokens of its requests together."""
        told: dict[RouterPort, TokenColumns] = defaultdict(TokenColumns)
        ended: list[Pair] = []
        broken: dict[Request, None] = {}
        more = drawn.more
        for row, ((request, seq), token_id) in enumerate(zip(batched.rows, drawn.token_ids, strict=False)):
            if seq.finish_reason is not None or request.has_ended:
                continue
            if token_id < 0:
                broken[request] = None
            elif more and row in more:
                if self._apply_more(request, seq, more[row], told[request.router]):
                    ended.append((request, seq))
            else:
                request.num_sampled_tokens += 1
                finish_reason, columns = seq.append_decoded(token_id), told[request.router]
                if finish_reason is not None:
                    columns.extras[len(columns.handles)] = TokenExtra(finish_reason=finish_reason)
                    ended.append((request, seq))
                columns.handles.append(request.handle)
                columns.indexes.append(seq.index)
                columns.offsets.append(seq.num_output_tokens - 1)
                columns.token_ids.append(token_id)
        for router, columns in told.items():
            router.token_rows(columns)
        extras = () if batched.step.rows is None else batched.step.rows.draws.extras
        self._follow(batched.rows[row][1] for row, spec in extras if spec.mask is not None and not spec.num_candidates)
        for request, seq in ended:
            if request not in broken:
                self._settle(request, seq)
        return broken

    def _apply_more(
        self, request: Request, seq: Sequence, drawn: tuple[SampledToken, ...], columns: TokenColumns
    ) -> bool:
        """Takes a token with its log-probabilities, or the candidates of a beam.

        Returns whether the choice, or the search, may have ended.
        """
        if seq.num_candidates:
            seq.num_ended_tokens += 1
            self._search(request, seq, drawn)
            return True
        ((token_id, logprobs),) = drawn
        request.num_sampled_tokens += 1
        finish_reason = seq.append_decoded(token_id)
        offset = seq.num_output_tokens - 1
        columns.add(request.handle, seq.index, offset, token_id, TokenExtra(logprobs, finish_reason))
        return finish_reason is not None

    def _settle(self, request: Request, seq: Sequence) -> None:
        """Ends a request whose last choice has ended, or releases the blocks of a choice that has."""
        if request.group.is_finished:
            self._owner.end(request)
        elif seq.is_finished:
            self._batch.choice_ended(request, seq)

    def _take(self, request: Request, seq: Sequence, drawn: list[tuple[SampledToken, ...]]) -> None:
        """Takes one token for each choice that draws from `seq`, or the candidates of a beam."""
        if request.spec.sampling.beam_width:
            self._search(request, seq, drawn[0])
            return
        for choice, (token,) in zip(seq.drawers, drawn, strict=True):
            request.take_token(choice, token)
        self._follow(seq.drawers)

    def _search(self, request: Request, beam: Sequence, candidates: tuple[SampledToken, ...]) -> None:
        """Takes the candidates of a beam; with those of the last one, all go on."""
        group = request.group
        assert isinstance(group, BeamGroup)
        self._batch.beams_moved(request, group.draw(beam, candidates_of(candidates), self._pool))
        if group.is_finished:
            request.tell_found(group)
        else:
            self._follow(group.sequences)

    def _follow(self, sequences: Iterable[Sequence]) -> None:
        """Asks for the next masks of sequences that follow a grammar and have new tokens."""
        if self._parts.guides is not None:
            self._parts.guides.follow(each.guide for each in sequences)

    # --- from hand-offs (TransferOwner) ---

    def received(self, request: Request, block_ids: SequenceOf[BlockId], first_tokens: FirstTokens) -> None:
        """See `TransferOwner`. All choices join the batch."""
        group, prefix = request.group, request.group.prefix
        table = new_block_table(prefix.block_table)
        table.extend(new_block_table(block_ids))
        self._cache.insert(request.spec.cache_salt, prefix.token_ids, table)
        group.land(block_ids, first_tokens, self._pool)
        group.follow(self._cache)
        self._follow(group.sequences)
        self._batch.join(request)
        self._moves.landed(request, first_tokens, self._parts.clock.now_s())
        if group.is_finished:
            if isinstance(group, BeamGroup):
                request.tell_found(group)
            self._owner.end(request)
        self._owner.changed()

    def transfer_failed(self, request: Request, error: TandemError) -> None:
        """See `TransferOwner`."""
        self._owner.end(request, error)

    def blocks_freed(self) -> None:
        """See `TransferOwner`."""
        self._owner.changed()
