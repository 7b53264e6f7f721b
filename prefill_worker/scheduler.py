"""Which prompts run, and how many tokens of each the next step computes. Pure: no clock, no I/O.

Owns the order of requests; reads the progress of their prefix (`Request.group.prefix`), never writes
it. Blocks and the engine are the step loop's: it allocates for `Plan.admitted`, launches `Plan.chunks`.

    WAITING → RUNNING      `plan` admits it: all blocks of the prompt fit now
       └─────────┴→ gone   `remove`, in any state

All blocks of a prompt are taken at admission, so running prompts never wait for each other
and a step always makes progress. Order is `Request.rank`; a prompt that does not fit may be
overtaken by those that do. Nobody starves: each prompt is overtaken at most `max_overtakes`
times, then it goes first and all others wait for it.

Prompts go to several decode workers, and one of those may be full, or slow to take what is pushed. Once others are in
use too, one destination holds at most half of the pool, blocks that wait to be taken included; a single prompt may hold
more. What exceeds that waits in line and is overtaken by prompts for others, which does not count.

Up to half of a step's tokens go to the prompts that they suffice to end, shortest first, so
that a short prompt does not wait behind a long one; the rest goes by order of admission.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.chunking import plan_chunks
from worker.request import Request

MAX_OVERTAKES = 64
"""Later prompts that may be admitted before an earlier one."""
DESTINATION_SHARE = 0.5
"""Of the pool, that one destination may hold while there are others."""
_REMEMBERED_PROMPTS = 64
"""A destination of one of so many latest prompts is in use."""
_NOTHING_LENT: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` more tokens of one prompt."""

    request: Request
    num_tokens: int
    is_last: bool
    """Whether they end the prompt, so that first tokens are drawn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: prompts that begin to run (to be given blocks now), and what is computed."""

    admitted: tuple[Request, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Caps of one step."""

    chunk_tokens: int
    max_seqs: int
    max_overtakes: int = MAX_OVERTAKES


class PrefillScheduler:
    """Waiting and running prompts of one worker."""

    def __init__(self, limits: BatchLimits, block_size: int, num_blocks: int) -> None:
        """`num_blocks`: of the pool, each of `block_size` tokens."""
        self._limits = limits
        self._block_size = block_size
        self._max_held = int(num_blocks * DESTINATION_SHARE)
        self._destinations: deque[str] = deque(maxlen=_REMEMBERED_PROMPTS)
        """Of the latest prompts."""
        self._waiting: dict[Request, int] = {}
        """In order of arrival, with how many later ones went before each."""
        self._running: list[Request] = []
        """In order of admission."""

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting or request in self._running

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts with blocks that are not computed to their end."""
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has been launched for."""
        return sum(_num_left(request) for request in (*self._waiting, *self._running))

    def add(self, request: Request) -> None:
        """Puts a request in line."""
        self._waiting[request] = 0
        self._destinations.append(request.destination)

    def remove(self, request: Request) -> None:
        """Forgets a request, computed or given up. Idempotent."""
        self._waiting.pop(request, None)
        if request in self._running:
            self._running.remove(request)

    def num_blocks(self, request: Request) -> int:
        """Blocks that its whole prompt takes, before it has any."""
        return request.group.prefix.blocks_wanted(_num_left(request), self._block_size)

    def plan(self, num_free_blocks: int, lent: Mapping[str, int] = _NOTHING_LENT) -> Plan:
        """Admits what fits into `num_free_blocks`, then shares the token budget among all that run.

        `lent`: blocks that prompts computed before still hold, by destination.
        """
        admitted = self._admit(num_free_blocks, Counter(lent)) if self._waiting else ()
        return Plan(admitted, self._share_budget())

    def _admit(self, num_free_blocks: int, held: Counter[str]) -> tuple[Request, ...]:
        """`held`: blocks by destination; what runs is added here."""
        for running in self._running:
            held[running.destination] += len(running.group.prefix.block_table)
        are_several = len({*self._destinations, *held}) > 1
        if not are_several:
            held.clear()
        admitted: list[Request] = []
        while len(self._running) < self._limits.max_seqs:
            request = self._next_fitting(num_free_blocks, held)
            if request is None:
                break
            self._overtake(request, held)
            del self._waiting[request]
            self._running.append(request)
            num_free_blocks -= self.num_blocks(request)
            if are_several:
                held[request.destination] += self.num_blocks(request)
            admitted.append(request)
        return tuple(admitted)

    def _overtake(self, request: Request, held: Mapping[str, int]) -> None:
        """Those before it that might have gone instead have been overtaken once more."""
        for earlier in self._waiting:
            if earlier is request:
                break
            self._waiting[earlier] += earlier.destination == request.destination or self._may_hold(earlier, held)

    def _next_fitting(self, num_free_blocks: int, held: Mapping[str, int]) -> Request | None:
        barred: set[str] = set()
        """Destinations of which an overdue prompt waits for blocks to come back."""
        for request, overtaken in self._waiting.items():
            if overtaken >= self._limits.max_overtakes and request.destination not in barred:
                if self._may_hold(request, held):
                    return request if self.num_blocks(request) <= num_free_blocks else None
                barred.add(request.destination)
        fitting = [
            request
            for request in self._waiting
            if self.num_blocks(request) <= num_free_blocks
            and request.destination not in barred
            and self._may_hold(request, held)
        ]
        return min(fitting, key=lambda request: request.rank, default=None)

    def _may_hold(self, request: Request, held: Mapping[str, int]) -> bool:
        """Whether its destination may hold its blocks too."""
        already = held.get(request.destination, 0)
        return not already or already + self.num_blocks(request) <= self._max_held

    def _share_budget(self) -> tuple[Chunk, ...]:
        # In order of admission: the oldest always advances, whatever priorities come after it.
        left = [_num_left(request) for request in self._running]
        express = _express(left, self._limits.chunk_tokens // 2)
        rest = [index for index in range(len(left)) if index not in express]
        budget_tokens = self._limits.chunk_tokens - sum(left[index] for index in express)
        chunks = plan_chunks([left[index] for index in rest], budget_tokens, self._limits.max_seqs)
        shares = dict(zip(rest, chunks, strict=True)) | {index: left[index] for index in express}
        return tuple(
            Chunk(request, shares[i], is_last=shares[i] == left[i])
            for i, request in enumerate(self._running)
            if shares[i] > 0
        )


def _num_left(request: Request) -> int:
    """Prompt tokens that no step has been launched for."""
    prefix = request.group.prefix
    return prefix.num_remaining_tokens - prefix.num_pending_tokens


def _express(left: Sequence[int], budget_tokens: int) -> frozenset[int]:
    """Which prompts can be computed to their end within `budget_tokens`, shortest first."""
    indices = []
    for index in sorted(range(len(left)), key=lambda index: (left[index], index)):
        if left[index] > budget_tokens:
            break
        budget_tokens -= left[index]
        indices.append(index)
    return frozenset(indices)
