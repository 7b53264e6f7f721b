"""Which prompts run, and how many tokens of each the next step computes. Pure: no clock, no I/O.

Owns the order of requests; reads the progress of their prefix (`Request.group.prefix`), never writes
it. Blocks and the engine are the step loop's: it takes blocks for what `admit` returns, and launches `chunks`.

    WAITING → RUNNING      `admit`: all blocks of the prompt fit now
       └─────────┴→ gone   `remove`, in any state

All blocks of a prompt are taken at admission, so running prompts never wait for each other
and a step always makes progress. Those that are found in the prefix cache are counted, since to
take one from there leaves one less for others; but not, of the prompt that goes first, those that
others hold now. The shortest goes first, within a bound on age (`worker.turns`); a prompt that does not
fit may be overtaken by those that do. Nobody starves: each prompt is overtaken at most `max_overtakes`
times, then it goes first and all others wait for it.

Prompts go to several decode workers, and one of those may be full, or slow to take what is pushed. Once others are in
use too, one destination holds at most half of the pool, blocks that wait to be taken included; a single prompt may hold
more. What exceeds that waits in line and is overtaken by prompts for others, which does not count.

Up to half of a step's tokens go to the prompts that they suffice to end, shortest first, so
that a short prompt does not wait behind a long one whose turn it is; the rest goes by turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.chunking import plan_chunks
from worker.request import Request
from worker.turns import Turn, turn_of

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
        self._waiting: dict[Request, _InLine] = {}
        """In order of arrival."""
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
        """Prompt tokens to compute that no step has been launched for."""
        in_line = sum(_num_left(request) - each.num_cached_tokens for request, each in self._waiting.items())
        return in_line + sum(map(_num_left, self._running))

    def add(self, request: Request, num_cached_tokens: int = 0) -> None:
        """Puts a request in line; so many of its tokens may be found in the cache when its turn comes."""
        self._waiting[request] = _InLine(num_cached_tokens)
        self._destinations.append(request.destination)

    def remove(self, request: Request) -> None:
        """Forgets a request, computed or given up. Idempotent."""
        self._waiting.pop(request, None)
        if request in self._running:
            self._running.remove(request)

    def num_blocks(self, request: Request) -> int:
        """Blocks that its whole prompt takes, before it has any."""
        return request.group.prefix.blocks_wanted(_num_left(request), self._block_size)

    def admit(
        self,
        num_available: int,
        lent: Mapping[str, int] = _NOTHING_LENT,
        num_held: Callable[[Request], int] = lambda _: 0,
    ) -> Request | None:
        """The next prompt that fits into `num_available` blocks now. Give it its blocks, then ask again.

        `lent`: blocks that prompts computed before still hold, by destination.
        `num_held`: how many of a prompt's blocks are found in the cache and held by others.
        """
        if not self._waiting or len(self._running) >= self._limits.max_seqs:
            return None
        held = self._held(lent)

        def fits(request: Request) -> bool:
            num_blocks = self.num_blocks(request)
            return num_blocks <= num_available or num_blocks - num_held(request) <= num_available

        request = self._next_fitting(num_available, fits, held)
        if request is not None:
            self._overtake(request, held)
            del self._waiting[request]
            self._running.append(request)
        return request

    def _held(self, lent: Mapping[str, int]) -> Mapping[str, int]:
        """Blocks by destination, one that is shared counted for each holder; nothing if there is but one."""
        held = Counter(lent)
        for running in self._running:
            held[running.destination] += len(running.group.prefix.block_table)
        return held if len({*self._destinations, *held}) > 1 else {}

    def _overtake(self, request: Request, held: Mapping[str, int]) -> None:
        """Those before it that might have gone instead have been overtaken once more."""
        for earlier in self._waiting:
            if earlier is request:
                break
            might_have_gone = earlier.destination == request.destination or self._may_hold(earlier, held)
            self._waiting[earlier].num_overtaken += might_have_gone

    def _next_fitting(
        self, num_available: int, fits: Callable[[Request], bool], held: Mapping[str, int]
    ) -> Request | None:
        """`fits` looks into the cache, which takes time: so it is asked of one prompt only."""
        barred: set[str] = set()
        """Destinations of which an overdue prompt waits for blocks to come back."""
        for request, in_line in self._waiting.items():
            if in_line.num_overtaken >= self._limits.max_overtakes and request.destination not in barred:
                if self._may_hold(request, held):
                    return request if fits(request) else None
                barred.add(request.destination)
        may_go = [each for each in self._waiting if each.destination not in barred and self._may_hold(each, held)]
        first = min(may_go, key=_turn, default=None)
        if first is None or fits(first):
            return first
        return min((each for each in may_go if self.num_blocks(each) <= num_available), key=_turn, default=None)

    def _may_hold(self, request: Request, held: Mapping[str, int]) -> bool:
        """Whether its destination may hold its blocks too."""
        already = held.get(request.destination, 0)
        return not already or already + self.num_blocks(request) <= self._max_held

    def chunks(self) -> tuple[Chunk, ...]:
        """What the next step computes: the token budget, shared among all that run."""
        left = [_num_left(request) for request in self._running]
        express = _express(left, self._limits.chunk_tokens // 2)
        rest = sorted((at for at in range(len(left)) if at not in express), key=lambda at: _turn(self._running[at]))
        budget_tokens = self._limits.chunk_tokens - sum(left[index] for index in express)
        chunks = plan_chunks([left[index] for index in rest], budget_tokens, self._limits.max_seqs)
        shares = dict(zip(rest, chunks, strict=True)) | {index: left[index] for index in express}
        return tuple(
            Chunk(request, shares[i], is_last=shares[i] == left[i])
            for i, request in enumerate(self._running)
            if shares[i] > 0
        )


class _InLine:
    """What is known of a prompt that waits."""

    def __init__(self, num_cached_tokens: int) -> None:
        self.num_cached_tokens = num_cached_tokens
        """That the cache knew when it came: an estimate."""
        self.num_overtaken = 0
        """Later ones that went before it."""


def _turn(request: Request) -> Turn:
    return turn_of(request, _num_left(request))


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
