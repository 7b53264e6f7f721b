"""Which prompt for another worker gets its blocks next. Pure: no clock, no I/O.

    in line ──next, take──▶ computing ──remove──▶ gone
       └────────────────remove──────────────────────┘

A prompt takes all its blocks at once, so prompts that are computed never wait for each other, and each step makes
progress. Blocks found in the prefix cache count as taken; of the prompt that goes first, blocks that others hold
already do not. The shortest prompt goes first, within a bound on age (`worker.admission.turn_of`). Prompts that fit
overtake one that does not, until it is overdue.

A holder may have at most `HOLDER_SHARE` of the pool, or one prompt of any length:

    beside decodes    all prompts together are one holder, so that decodes keep room
    alone             each destination is a holder, once others are in use too: it may be full, or slow to take blocks

Blocks of computed prompts that are still to be pushed count as their holder's. A prompt whose holder has its share
waits, and is overtaken by prompts of other holders, which is not counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from worker.admission import Line, Turn, is_overdue, note_overtaken, turn_of
from worker.request import Request
from worker.tuning import HOLDER_SHARE, REMEMBERED


class PromptLine:
    """Prompts of a worker: in line, and being computed."""

    def __init__(self, max_seqs: int, block_size: int, num_blocks: int, *, beside_decodes: bool = False) -> None:
        """At most `max_seqs` prompts are computed at a time; the pool has `num_blocks` of `block_size` tokens each."""
        self._max_seqs = max_seqs
        self._beside_decodes = beside_decodes
        self._block_size = block_size
        self._max_held = int(num_blocks * HOLDER_SHARE)
        self._destinations: deque[str] = deque(maxlen=REMEMBERED)
        """Destinations of the latest prompts."""
        self._line = Line(_turn)
        self._num_cached_tokens: dict[Request, int] = {}
        """Tokens of each prompt in line that the cache knew when the prompt came: an estimate."""
        self.computing: dict[Request, None] = {}
        """Prompts with blocks, in the order in which these got their blocks."""

    def __len__(self) -> int:
        """Prompts in line."""
        return len(self._line)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens to compute, tokens of steps in flight included."""
        in_line = sum(
            request.group.prefix.num_remaining_tokens - num_cached
            for request, num_cached in self._num_cached_tokens.items()
        )
        prefixes = [request.group.prefix for request in self.computing]
        return in_line + sum(each.num_tokens - each.num_pending_tokens - each.num_ended_tokens for each in prefixes)

    def add(self, request: Request, num_cached_tokens: int = 0) -> None:
        """Puts a prompt in line, of which the cache knows `num_cached_tokens` now."""
        self._line.add(request)
        self._num_cached_tokens[request] = num_cached_tokens
        self._destinations.append(request.destination or "")

    def remove(self, request: Request) -> None:
        """Forgets a prompt, computed or given up. Idempotent."""
        self._line.remove(request)
        self._num_cached_tokens.pop(request, None)
        self.computing.pop(request, None)

    def num_blocks(self, request: Request) -> int:
        """Blocks that a whole prompt takes, before the prompt has any."""
        prefix = request.group.prefix
        return prefix.blocks_wanted(prefix.num_remaining_tokens, self._block_size)

    def next(
        self, num_available: int, lent: Mapping[str, int], num_known: Callable[[Request], int] = lambda _: 0
    ) -> tuple[Request | None, bool]:
        """Returns the prompt whose turn it is, and whether it fits into `num_available` blocks. None = nobody's.

        `lent`: by destination, blocks that computed prompts hold. `num_known`: blocks of a prompt that the cache knows
        and others hold; looking for them takes time.
        """
        if len(self.computing) >= self._max_seqs:
            return None, False
        held = self._held(lent)
        first: Request | None = None
        barred: set[str] = set()
        """Holders of which an overdue prompt waits for blocks to come back."""
        for request in self._line:
            holder = self._holder(request)
            if holder in barred:
                continue
            if not self._may_hold(request, held):
                barred |= {holder} if is_overdue(request) else set()
                continue
            num_lacking = self.num_blocks(request) - num_available
            if num_lacking <= 0 or (first is None and num_lacking <= num_known(request)):
                return request, True
            first = first or request
            if is_overdue(request):
                break
        return first, False

    def take(self, request: Request, lent: Mapping[str, int]) -> None:
        """Moves a prompt to those that are computed. Prompts that might have gone before it are overtaken."""
        held, holder = self._held(lent), self._holder(request)
        self._line.remove(request)
        del self._num_cached_tokens[request]
        self.computing[request] = None
        rivals = (each for each in self._line if self._holder(each) == holder or self._may_hold(each, held))
        note_overtaken(rivals, [request])

    def _holder(self, request: Request) -> str:
        return "" if self._beside_decodes else request.destination or ""

    def _held(self, lent: Mapping[str, int]) -> Mapping[str, int]:
        """Returns blocks by holder, a shared one counted for each prompt; none if there is but one destination."""
        held = Counter(lent)
        for request in self.computing:
            held[request.destination or ""] += len(request.group.prefix.block_table)
        if self._beside_decodes:
            return {"": held.total()}
        return held if len({*self._destinations, *held}) > 1 else {}

    def _may_hold(self, request: Request, held: Mapping[str, int]) -> bool:
        """Whether its holder may have the prompt's blocks too."""
        already = held.get(self._holder(request), 0)
        return not already or already + self.num_blocks(request) <= self._max_held


def _turn(request: Request) -> Turn:
    return turn_of(request, request.group.prefix.num_remaining_tokens)
