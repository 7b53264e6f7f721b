"""The requests that were admitted, running or waiting, and the blocks that they hold.

Carries out what `scheduler.StepPlanner` decides: takes blocks from the cache, moves sequences on, makes the step to
launch, in which prompts for other workers are computed too. A step may be planned while another one is in flight; its
sequences' last tokens may then still be pending.

Does not know routers, hand-offs, clocks or the engine.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from decode_worker.decoding import Decoding
from decode_worker.scheduler import Beside, StepPlan, StepPlanner
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.step import ScheduledSeq, Step
from prefill_worker.prompts import Prompts
from shell.telemetry.events import Preempted
from tandem.types import BlockId, WaitReason
from worker.admission import Forecast, note_overtaken, turn_of
from worker.budget import ChunkBudget
from worker.releases import BlockReleases
from worker.request import Request
from worker.source import BatchedStep, Wait


class RunningBatch:
    """Running and waiting requests, each list in rank order."""

    def __init__(
        self,
        cache: PrefixCache,
        max_seqs: int,
        forecast: Forecast,
        budget: ChunkBudget,
        releases: BlockReleases,
        prompts: Prompts | None = None,
    ) -> None:
        """`prompts`: computed beside; read whenever a step is planned."""
        self.budget = budget
        self._prompts = prompts
        self.releases = releases
        self._cache = cache
        self._pool = cache.pool
        self._max_seqs = max_seqs
        self._forecast = forecast
        self._requests: set[Request] = set()
        self._running: list[Request] = []
        self._decoding = Decoding(cache)
        """Choices that decode."""
        self._waiting: list[Request] = []
        self.is_dry = False
        """Whether some run, and at the last look none could for lack of blocks."""
        self.num_preemptions = 0
        """How often blocks were taken from a request."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def num_running(self) -> int:
        """Seats that are taken."""
        return sum(request.group.num_seats for request in self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a seat."""
        return sum(request.group.num_seats for request in self._waiting)

    @property
    def running(self) -> SequenceOf[Request]:
        """Returns the requests with seats."""
        return self._running

    @property
    def waiting(self) -> SequenceOf[Request]:
        """Returns the requests without seats."""
        return self._waiting

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens to compute before all sequences are decoding."""
        return sum(map(_num_prompt_tokens_left, self._requests))

    def running_waits(self) -> Iterator[Wait]:
        """Running requests that tell nothing now: their prompts are computed, again or for the first time, they lack
        blocks to go on, or they search with beams.
        """
        for request in self._running:
            if request.group.num_remaining_tokens > request.group.num_seats:
                yield request, WaitReason.PROMPT
            elif not self._decoding.steps(request) and request.group.num_missing_blocks(self._pool):
                yield request, WaitReason.ROOM
            elif request.spec.sampling.beam_width:
                yield request, WaitReason.SEARCH

    def line_waits(self) -> Iterator[Wait]:
        """Requests without a seat."""
        for request in self._waiting:
            if request.group.holds_blocks:
                yield request, WaitReason.SEAT
            elif request.started_s is None:
                yield request, WaitReason.ROOM
            else:
                yield request, WaitReason.PREEMPTED

    def join(self, request: Request) -> None:
        """Adds a request that waits for its first step here, with its blocks, if any."""
        self._requests.add(request)
        bisect.insort(self._waiting, request, key=lambda each: each.rank)

    def leave(self, request: Request) -> None:
        """Takes it out and releases its blocks, the full ones to the cache. A no-op if it is not here."""
        if request in self._requests:
            self.suspend(request)
            self._requests.remove(request)
            self._give_back(request)

    def suspend(self, request: Request) -> None:
        """Bars a request from further steps; the request stays here, with its blocks. What steps in flight bring is
        applied.
        """
        self._decoding.leave(request)
        for line in (self._running, self._waiting):
            if request in line:
                line.remove(request)

    def choice_ended(self, request: Request, choice: Sequence) -> None:
        """Forgets a choice of several; see `leave`."""
        self._decoding.choice_left(request, choice)
        request.group.remember_sequence(choice, self._cache)
        self.releases.release([choice.take_blocks()])

    def beams_moved(self, request: Request, tables: Iterable[SequenceOf[BlockId]]) -> None:
        """Its beams have gone on together; `tables` are those of beams that nobody continued."""
        self._decoding.beams_moved(request)
        self.releases.release(tables)

    def next_step(self) -> BatchedStep | None:
        """Plans a step with none in flight; None = no sequence can step now.

        Groups that a plan lets in without blocks take over what the cache knows of their tokens: the step is planned
        again then.
        """
        while True:
            plan, beside = self._plan(self._chunk_tokens)
            if self._attach(plan.admitted) or self._attach_more(plan):
                continue
            step = self._carry_out(plan, beside)
            self.is_dry = step is None and plan.lacks_blocks
            if step is not None or not plan.preempted:
                return step

    def step_behind(self, running: BatchedStep, *, with_prompts: bool) -> BatchedStep | None:
        """Plans a step behind the one in flight; None = it is better planned once that has ended.

        That is so if blocks are short (some may come back by then, and none can be taken away before), if a request
        waits for the seat of a sequence that ends with the running step, and, unless `with_prompts`, if either step
        computes a prompt.
        """
        if not with_prompts and not running.is_decode:
            return None
        while True:
            chunk_tokens = self._chunk_tokens if with_prompts else self.budget.chunk_tokens
            plan, beside = self._plan(chunk_tokens, running.unsettled)
            if plan.preempted or plan.lacks_blocks:
                return None
            if not with_prompts and not all(_is_decode(request, seq) for request, seq, _ in plan.scheduled):
                return None
            if len(plan.admitted) < len(self._waiting) and any(seq.is_exhausted for _, seq in running.rows):
                return None
            if not with_prompts or not (self._attach(plan.admitted) or self._attach_more(plan)):
                return self._carry_out(plan, beside, running)

    @property
    def num_decodes(self) -> int:
        """Sequences that decode, or will in the next step."""
        landed = (each for each in self._waiting if each.group.holds_blocks)
        return sum(len(each.group.running) for each in (*self._running, *landed) if each.group.is_forked)

    @property
    def wait_ratio(self) -> float:
        """How long the worst-off prompt waits, of prompts being computed or waiting for that; 0 = there is none."""
        if self._decoding.num_whole == len(self._running) and not self._waiting and not self._prompts_beside:
            return 0.0
        lacking = [
            (each, num_tokens)
            for each in (*self._running, *self._waiting, *self._prompts_beside)
            if each not in self._decoding
            and (num_tokens := each.group.num_remaining_tokens) > len(each.group.running)  # a decode lacks one
        ]
        lacking.sort(key=lambda each: turn_of(*each))
        return self.budget.wait_ratio([num_left for _, num_left in lacking])

    @property
    def _prompts_beside(self) -> Collection[Request]:
        return () if self._prompts is None else self._prompts.computing

    @property
    def _chunk_tokens(self) -> int:
        ratio = self.wait_ratio
        return self.budget.tokens(self.num_decodes, ratio) if ratio else self.budget.chunk_tokens

    def _plan(self, chunk_tokens: int, sitting_out: Collection[Sequence] = ()) -> tuple[StepPlan, Beside | None]:
        """Returns the plan of the next step, and what else takes part in the step; None = the plan is of all."""
        beside = self._decoding.wanted()
        if beside is not None:
            others = []
            if len(beside.requests) < len(self._running):
                others = [each for each in self._running if each not in beside.requests]
            plan = self._planned(others, chunk_tokens, sitting_out, beside)
            if not plan.preempted and not plan.lacks_blocks:
                return plan, beside
        return self._planned(self._running, chunk_tokens, sitting_out), None

    def _planned(
        self,
        running: list[Request],
        chunk_tokens: int,
        sitting_out: Collection[Sequence],
        beside: Beside | None = None,
    ) -> StepPlan:
        return StepPlanner(
            running,
            self._waiting,
            self._cache,
            self._forecast,
            max_seqs=self._max_seqs,
            chunk_tokens=chunk_tokens,
            beside=beside,
            prompts=self._prompts_beside,
            sitting_out=sitting_out,
        ).plan()

    def _carry_out(
        self, plan: StepPlan, beside: Beside | None, running: BatchedStep | None = None
    ) -> BatchedStep | None:
        """`beside`: what takes part too; `running`: the step planned before, if it is in flight."""
        for request in plan.admitted:
            self._waiting.remove(request)
            bisect.insort(self._running, request, key=lambda each: each.rank)
        note_overtaken(self._waiting, plan.admitted)
        for request in plan.preempted:
            self._preempt(request)
        if not plan.scheduled and beside is None:
            return None
        if self._waiting and not self._waiting[0].group.holds_blocks and self._waiting[0].reads_cache:
            self._waiting[0].group.prefetch(self._cache)
        decodes = [(request, seq) for request, seq, _ in plan.scheduled if _is_decode(request, seq)]
        others = [each for each in plan.scheduled if not _is_decode(*each[:2])]
        rows, pairs, copies = self._decoding.schedule(decodes, beside=beside is not None, is_behind=running is not None)
        chunks: list[ScheduledSeq] = []
        for request, seq, num_tokens in others:
            copies += request.group.copy_on_write(seq, self._cache)
            chunks.append(self._schedule(seq, num_tokens))
        pairs_of_chunks = tuple([(request, seq) for request, seq, _ in others])
        continues = running is not None and running.is_continued_by(pairs_of_chunks)
        step = Step(tuple(chunks), tuple(copies), self._cache.take_moves(), rows, continues)
        planned = tuple([request for request, *_ in plan.scheduled])
        return BatchedStep(step, pairs, pairs_of_chunks, planned)

    def _attach(self, admitted: Iterable[Request]) -> bool:
        """Whether any of them has found blocks."""
        found = False
        for request in admitted:
            if not request.group.holds_blocks and request.reads_cache:
                found |= request.group.attach(self._cache)
                if request.started_s is not None:
                    request.group.prefix.num_cached_tokens = 0  # it finds what it has computed itself
        return found

    def _attach_more(self, plan: StepPlan) -> bool:
        """Whether any prompt for another worker that is about to begin finds more than when it took its blocks."""
        if self._prompts is None:
            return False
        return self._prompts.find_more(request for request, *_ in plan.scheduled if request.for_another)

    def _give_back(self, request: Request) -> None:
        request.group.remember(self._cache)
        self.releases.release(request.group.take_blocks())

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.events.emit(Preempted())
        self._decoding.leave(request)
        self._give_back(request)
        if request in self._running:
            self._running.remove(request)
            bisect.insort(self._waiting, request, key=lambda each: each.rank)

    def _schedule(self, seq: Sequence, num_tokens: int) -> ScheduledSeq:
        num_blocks = seq.blocks_wanted(num_tokens, self._pool.block_size)
        if num_blocks:
            seq.add_blocks(self._cache.allocate(num_blocks))
        return seq.schedule(num_tokens)


def _num_prompt_tokens_left(request: Request) -> int:
    return max(0, request.group.num_remaining_tokens - request.group.num_seats)


def _is_decode(request: Request, seq: Sequence) -> bool:
    """Whether the next step computes the sequence's newest token, and draws the next token."""
    return request.group.is_forked and seq.num_remaining_tokens == 1
