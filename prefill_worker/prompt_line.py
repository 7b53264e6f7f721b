"""Which prompt for another worker gets its blocks next. Pure: no clock, no I/O.

    in line ──next, take──▶ computing ──remove──▶ gone
       └────────────────remove──────────────────────┘

A prompt takes all its blocks at once, so prompts that are computed never wait for each other, and each step makes
progress. Blocks found in the prefix cache count as taken; of the prompt that goes first, blocks that others hold
already do not. The shortest prompt goes first, within a bound on age (`worker.turns`). Prompts that fit overtake one
that does not. Nobody starves: after `max_overtakes` a prompt goes first, and all others wait for it.

A holder may have at most `SHARE` of the pool, or one prompt of any length:

    beside decodes    all prompts together are one holder, so that decodes keep room
    alone             each destination is a holder, once others are in use too: it may be full, or slow to take blocks

Blocks of computed prompts that are still to be pushed count as their holder's. A prompt whose holder has its share
waits, and is overtaken by prompts of other holders, which is not counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from worker.request import Request
from worker.turns import turn_of

MAX_OVERTAKES = 64
"""Later prompts that may get blocks before an earlier one."""
SHARE = 0.5
"""Of the pool, that one holder may have."""
_REMEMBERED_PROMPTS = 64
"""Latest prompts whose destinations count as in use."""


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Caps of a line."""

    max_seqs: int
    """Prompts that are computed at a time."""
    beside_decodes: bool = False
    max_overtakes: int = MAX_OVERTAKES


@dataclass(slots=True)
class _InLine:
    """What is known of a prompt in line."""

    num_cached_tokens: int
    """Tokens that the cache knew when the prompt came: an estimate."""
    num_overtaken: int = 0
    """Later prompts that got blocks before it."""


class PromptLine:
    """Prompts in line, and prompts that are being computed, of one worker."""

    def __init__(self, limits: LineLimits, block_size: int, num_blocks: int) -> None:
        """`num_blocks`: of the pool, each of `block_size` tokens."""
        self._limits = limits
        self._block_size = block_size
        self._max_held = int(num_blocks * SHARE)
        self._destinations: deque[str] = deque(maxlen=_REMEMBERED_PROMPTS)
        """Of the latest prompts."""
        self._waiting: dict[Request, _InLine] = {}
        """In order of arrival."""
        self.computing: dict[Request, None] = {}
        """Prompts with blocks, in the order in which they got them."""

    def __len__(self) -> int:
        """Prompts in line."""
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens to compute, those of steps in flight included."""
        in_line = sum(
            request.group.prefix.num_remaining_tokens - each.num_cached_tokens
            for request, each in self._waiting.items()
        )
        prefixes = [request.group.prefix for request in self.computing]
        return in_line + sum(each.num_tokens - each.num_pending_tokens - each.num_ended_tokens for each in prefixes)

    def add(self, request: Request, num_cached_tokens: int = 0) -> None:
        """Puts a prompt in line, of which the cache knows `num_cached_tokens` now."""
        self._waiting[request] = _InLine(num_cached_tokens)
        self._destinations.append(request.destination or "")

    def remove(self, request: Request) -> None:
        """Forgets a prompt, computed or given up. Idempotent."""
        self._waiting.pop(request, None)
        self.computing.pop(request, None)

    def num_blocks(self, request: Request) -> int:
        """Blocks that a whole prompt takes, before it has any."""
        prefix = request.group.prefix
        return prefix.blocks_wanted(prefix.num_remaining_tokens, self._block_size)

    def next(
        self, num_available: int, lent: Mapping[str, int], num_known: Callable[[Request], int] = lambda _: 0
    ) -> tuple[Request | None, bool]:
        """Returns the prompt whose turn it is, and whether it fits into `num_available` blocks. None = nobody's.

        `lent`: by destination, blocks that computed prompts hold. `num_known`: blocks of a prompt that the cache knows
        and others hold; looking for them takes time.
        """
        if not self._waiting or len(self.computing) >= self._limits.max_seqs:
            return None, False
        held = self._held(lent)

        def fits(request: Request) -> bool:
            num_lacking = self.num_blocks(request) - num_available
            return num_lacking <= 0 or num_lacking <= num_known(request)

        barred: set[str] = set()
        """Holders of which an overdue prompt waits for blocks to come back."""
        for request, in_line in self._waiting.items():
            if in_line.num_overtaken >= self._limits.max_overtakes and self._holder(request) not in barred:
                if self._may_hold(request, held):
                    return request, fits(request)
                barred.add(self._holder(request))
        may_go = [each for each in self._waiting if self._holder(each) not in barred and self._may_hold(each, held)]
        first = min(may_go, key=_turn, default=None)
        if first is None or fits(first):
            return first, first is not None
        other = min((each for each in may_go if self.num_blocks(each) <= num_available), key=_turn, default=None)
        return other or first, other is not None

    def take(self, request: Request, lent: Mapping[str, int]) -> None:
        """The prompt is computed from now on. Prompts before it that might have gone are overtaken once more."""
        held = self._held(lent)
        for earlier, in_line in self._waiting.items():
            if earlier is request:
                break
            is_rival = self._holder(earlier) == self._holder(request)
            in_line.num_overtaken += is_rival or self._may_hold(earlier, held)
        del self._waiting[request]
        self.computing[request] = None

    def _holder(self, request: Request) -> str:
        return "" if self._limits.beside_decodes else request.destination or ""

    def _held(self, lent: Mapping[str, int]) -> Mapping[str, int]:
        """Returns blocks by holder, a shared one counted for each prompt; none if there is but one destination."""
        held = Counter(lent)
        for request in self.computing:
            held[request.destination or ""] += len(request.group.prefix.block_table)
        if self._limits.beside_decodes:
            return {"": held.total()}
        return held if len({*self._destinations, *held}) > 1 else {}

    def _may_hold(self, request: Request, held: Mapping[str, int]) -> bool:
        """Whether its holder may have the prompt's blocks too."""
        already = held.get(self._holder(request), 0)
        return not already or already + self.num_blocks(request) <= self._max_held


def _turn(request: Request) -> tuple[int, int, int]:
    return turn_of(request, request.group.prefix.num_remaining_tokens)
