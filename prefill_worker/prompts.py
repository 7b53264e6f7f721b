"""Prompts that a worker computes for other workers: in line, in steps, on their way. A `Source`.

    Prefill ─▶ line ─start─▶ computing: PrefillStarted, chunks ─▶ computed: PrefillDone, first tokens ─▶ HandoffDone
                               └─ Grant: transfer opens, finished blocks are pushed ─────────────┘

This is what a prefill role is, on a worker that does nothing else as on one that decodes too. The line decides who
starts (`prompt_line`). A prompt starts with all its blocks, found in the cache or allocated, so it is never preempted.
Its last token gives each choice its first one, which the router gets at once. Its blocks stay lent to the transfer
until they are pushed. Alone, the line plans the steps, of which half of the tokens go to prompts that end with them.
Beside a running batch, that plans them (`decode_worker.running_batch`). `decode_worker.reservations` starts prompts
then, and gives up one that stands in the way of others.

All on the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from engine.beam_group import candidates_of
from engine.sequence import Sequence
from engine.step import SampledToken, Step
from kvtransfer.base import Sender, TransferReport
from prefill_worker.outgoing_transfer import OutgoingTransfer
from prefill_worker.prompt_line import PromptLine
from shell.telemetry.events import Transferred
from tandem.errors import TandemError
from tandem.first_tokens import encode_first_tokens
from tandem.types import GroupSpec, WaitReason, WorkerLoad
from worker.budget import ChunkBudget
from worker.core import Worker
from worker.plan import share_tokens
from worker.ports import WorkerParts
from worker.releases import BlockReleases
from worker.request import Request
from worker.source import BatchedStep, Owner, Sources, Wait


class Prompts:
    """The prompts of a worker. A `PromptSource`, and an `OutgoingOwner`."""

    def __init__(
        self,
        parts: WorkerParts,
        sender: Sender | None,
        releases: BlockReleases,
        owner: Owner,
        *,
        beside_decodes: bool = False,
    ) -> None:
        """`sender` None = no prompt may be added. `beside_decodes`: whether a running batch plans the steps."""
        self._cache = parts.cache
        self._pool = parts.cache.pool
        self._clock = parts.clock
        self._validator = parts.validator
        self._sender = sender
        self._sizes = parts.sizes
        self._beside_decodes = beside_decodes
        self._releases = releases
        self._owner = owner
        self._line = PromptLine(
            parts.sizes.max_seqs, self._pool.block_size, self._pool.num_blocks, beside_decodes=beside_decodes
        )
        self._live: dict[Request, None] = {}
        """Requests that have not ended, in order of arrival."""
        self._transfers: dict[Request, OutgoingTransfer] = {}
        """Transfers of live requests, and of ended requests whose blocks the sender still uses."""

    @property
    def computing(self) -> Collection[Request]:
        """Returns the prompts with blocks, whose tokens steps compute."""
        return self._line.computing

    @property
    def num_in_line(self) -> int:
        """Returns the number of prompts without blocks."""
        return len(self._line)

    @property
    def is_moving(self) -> bool:
        """Whether any prompt is under way."""
        return len(self._live) > len(self._line)

    @property
    def is_settled(self) -> bool:
        """Whether no prompt is here, and no block is lent to the sender."""
        return not self._live and not self._transfers

    def add_to(self, load: WorkerLoad) -> WorkerLoad:
        """Returns the load with that of the prompts; each counts as one sequence."""
        num_computing, num_waiting = len(self._line.computing), len(self._line)
        load = replace(
            load,
            running_seqs=load.running_seqs + num_computing,
            waiting_seqs=load.waiting_seqs + num_waiting,
            queued_prompt_tokens=load.queued_prompt_tokens + self._line.num_tokens,
            live_transfers=load.live_transfers + self._num_granted,
        )
        if self._beside_decodes:
            load = replace(load, running_for_others=num_computing, waiting_for_others=num_waiting)
        return load

    # --- requests ---

    def check(self, spec: GroupSpec) -> None:
        """Raises InvalidRequest if the prompt cannot be computed here."""
        self._validator.validate_group(spec)
        num_pool_tokens = self._pool.num_blocks * self._pool.block_size
        self._validator.validate_prefix(spec, min(self._sizes.max_sequence_tokens, num_pool_tokens))

    def add(self, request: Request) -> None:
        """See `Source`."""
        assert self._sender is not None
        transfer = OutgoingTransfer(request, self._sender, self._pool, self)
        self._live[request] = None
        self._transfers[request] = transfer
        transfer.start()

    def enter(self, request: Request) -> None:
        """See `Source`."""
        num_known = 0
        if request.reads_cache:
            num_known = self._cache.match(request.spec.cache_salt, request.group.prefix.token_ids)
            request.group.prefetch(self._cache)
        self._line.add(request, num_known)

    def grant(self, request: Request, ticket: bytes, kv_endpoint: bytes) -> None:
        """See `PromptSource`."""
        self._transfers[request].grant(ticket, kv_endpoint)

    def forget(self, request: Request, error: TandemError | None) -> None:
        """See `Source`. A transfer under way is given up."""
        del self._live[request]
        self._leave(request)
        self._transfers[request].abort()

    def _leave(self, request: Request) -> None:
        """Gives the blocks of a prompt back, the full ones to the cache: no further step computes it."""
        self._line.remove(request)
        request.group.remember(self._cache)
        self._releases.release(request.group.take_blocks())

    def waits(self, *, line_moves: bool) -> Iterator[Wait]:
        """See `Source`. All live requests are among them, since none gets more tokens before it ends."""
        for request in self._live:
            if request in self._line.computing:
                yield request, WaitReason.PROMPT
            elif request.started_s is not None:
                yield request, WaitReason.HANDOFF if self._transfers[request].is_granted else WaitReason.GRANT
            elif line_moves:
                yield request, WaitReason.PREFILL_LINE

    @property
    def ungranted(self) -> Collection[Request]:
        """Returns the computed prompts that wait for their grant; none if any prompt was granted."""
        if self._num_granted:
            return ()
        return [each for each in self._live if each.started_s is not None and each not in self._line.computing]

    # --- steps ---

    def next_step(self) -> BatchedStep | None:
        """Starts prompts as far as there is room; then returns a step of prompts alone."""
        return self._step()

    def step_behind(self, running: BatchedStep, *, with_prompts: bool) -> BatchedStep | None:
        """See `Source`. None without prompts."""
        return self._step(running) if with_prompts else None

    def _step(self, running: BatchedStep | None = None) -> BatchedStep | None:
        """Returns the next step; `running` is the step in flight, None = there is none."""
        while self.start_next(self._cache.num_available)[0] is not None:
            pass
        sitting_out = () if running is None else running.unsettled
        while True:
            prefixes = [(each, each.group.prefix) for each in self.computing if each.group.prefix not in sitting_out]
            prompts = [(each, prefix.num_remaining_tokens) for each, prefix in prefixes if prefix.num_remaining_tokens]
            chunk_tokens = self._sizes.chunk_tokens.alone
            shares = share_tokens(prompts, chunk_tokens, chunk_tokens // 2)
            chunks = [(request, share) for (request, _), share in zip(prompts, shares, strict=True) if share]
            if not self.find_more(request for request, _ in chunks):
                break
        if not chunks:
            return None
        seqs = tuple(request.group.prefix.schedule(num_tokens) for request, num_tokens in chunks)
        pairs = tuple((request, request.group.prefix) for request, _ in chunks)
        continues = running is not None and running.is_continued_by(pairs)
        step = Step(seqs, moves=self._cache.take_moves(), continues=continues)
        return BatchedStep(step, (), pairs, tuple(request for request, _ in chunks))

    def start_next(self, num_available: int) -> tuple[Request | None, bool]:
        """Starts the prompt whose turn it is, if the prompt fits into `num_available` blocks: it takes all its blocks.

        Returns the prompt that has started, and whether one lacks room; neither if it is nobody's turn.
        """
        lent = self._lent()
        request, fits = self._line.next(num_available, lent, self._num_known)
        if request is None or not fits:
            return None, request is not None
        self._line.take(request, lent)
        if request.reads_cache:
            request.group.attach(self._cache)
        request.group.prefix.add_blocks(self._cache.allocate(self._line.num_blocks(request)))
        return request, False

    def find_more(self, requests: Iterable[Request]) -> bool:
        """Returns whether any prompt that is about to begin finds more in the cache than when it took its blocks."""
        found = False
        for request in requests:
            if request.started_s is None and request.reads_cache:
                found |= request.group.attach_more(self._cache)
        return found

    def started(self, request: Request) -> None:
        """See `PromptSource`. The router looks for room elsewhere from now on."""
        request.router.prefill_started(request.handle)
        if request.group.prefix.num_cached_tokens:
            self._lend(request)

    def apply(self, request: Request, seq: Sequence, drawn: list[tuple[SampledToken, ...]]) -> None:
        """Lends the blocks that a chunk has filled. With the last chunk, the router gets the first tokens at once; the
        rest is handed over, unless these tokens end every choice. Candidates of a beam search go with the hand-off.
        """
        if not drawn and not seq.is_computed:
            self._lend(request)
            return
        request.owes_prefill_done = False
        request.prompt_computed(self._clock.now_s())
        if request.spec.sampling.beam_width:
            payload = encode_first_tokens(candidates_of(drawn[0]))
        else:
            first = {choice.index: token for choice, (token,) in zip(seq.drawers, drawn, strict=True)}
            for choice in seq.drawers:
                request.take_token(choice, first[choice.index])
            payload = encode_first_tokens({index: token.token_id for index, token in first.items()})
        if request.group.is_finished:
            self._owner.end(request)
            return
        self._transfers[request].finish(len(seq.block_table), payload)
        self._leave(request)

    def _lend(self, request: Request) -> None:
        """Lends the blocks that are filled to the end and in place: the next chunk will not touch them."""
        prefix = request.group.prefix
        full = prefix.block_table[: prefix.num_ended_tokens // self._pool.block_size]
        self._transfers[request].lend(self._cache.num_loaded(full))

    def _lent(self) -> Mapping[str, int]:
        """Returns, by destination, the blocks that are lent, those of ended requests included."""
        lent: Counter[str] = Counter()
        for request, transfer in self._transfers.items():
            if request not in self._line.computing:
                lent[request.destination or ""] += transfer.num_lent
        return lent

    def _num_known(self, request: Request) -> int:
        if not request.reads_cache:
            return 0
        return self._cache.num_held(request.spec.cache_salt, request.group.prefix.token_ids)

    @property
    def _num_granted(self) -> int:
        return sum(transfer.is_granted for transfer in self._transfers.values())

    # --- from transfers (OutgoingOwner) ---

    def transfer_committed(self, request: Request, report: TransferReport) -> None:
        """See `OutgoingOwner`."""
        if request not in self._live:
            return  # it was released just now
        request.router.handoff_done(request.handle, report.num_bytes, report.seconds, report.route)
        request.events.emit(Transferred(report.num_bytes, report.seconds, report.transport, report.num_spans))
        self._owner.end(request)

    def request_failed(self, request: Request, error: TandemError) -> None:
        """See `OutgoingOwner`."""
        self._owner.end(request, error)

    def blocks_returned(self, request: Request) -> None:
        """See `OutgoingOwner`."""
        if self._transfers[request].has_ended:
            del self._transfers[request]
        self._owner.changed()


def new_prefill_worker(parts: WorkerParts, sender: Sender) -> Worker:
    """Returns a prefill worker: the core on a line of prompts and nothing else."""
    budget = ChunkBudget(parts.sizes.chunk_tokens.alone)

    def sources(owner: Owner, releases: BlockReleases) -> Sources:
        return Sources(prompts=Prompts(parts, sender, releases, owner))

    return Worker(parts, budget, sources, overlap_steps=True)
