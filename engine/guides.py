"""Which tokens each choice of a constrained request may draw: its place in the grammar, and the masks of a whole batch.

    Guides.begin   a thread compiles the grammar, and takes each choice to where its tokens have brought it
    Guide          one choice's place; `mask` is None from `append` on, until the mask after that token is there
    Guides.follow  names those that have moved on; `start` has one call in a thread make the masks of all of them

A place is a function of the choice's tokens alone, so any worker can go on from them. Where a grammar leaves nothing to
write, or becomes too complex to follow, `lost` is told. All calls on the control loop; the work is done in threads.
Knows neither requests nor steps.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from engine.draws import TokenMask
from models.grammar import GrammarCompiler
from shell.telemetry.logging import get_logger
from tandem.errors import InternalError, InvalidRequest, TandemError
from tandem.types import Constraint, TokenId

_log = get_logger(__name__)

MAX_KEPT_GRAMMARS = 32
"""Compiled ones, for requests to come. The largest take some ten megabytes each."""
MASKS_WITHIN_S = 0.002
"""Time that a step waits for the masks of choices that drew in the step before; the step then goes on without these
masks."""
_MAX_MASK_THREADS = 8
_STACK_BYTES = 64 * 1024 * 1024
"""Stack of the thread that compiles: more than in the router's check (`router.grammar_check`), since grammars nest."""
Lost = Callable[[TandemError], None]


class Guide:
    """A choice's place in its grammar."""

    __slots__ = ("_lost", "_matcher", "_untaken", "constraint", "mask")

    def __init__(self, constraint: Constraint, matcher: LLMatcher, mask: TokenMask, lost: Lost) -> None:
        """`mask`: what may be drawn where `matcher` is. `lost` is called once if the choice cannot go on."""
        self.constraint = constraint
        self.mask: TokenMask | None = mask
        """What may be drawn next; None = not known yet."""
        self._matcher = matcher
        self._untaken: list[int] = []
        self._lost = lost

    def append(self, token_id: TokenId) -> None:
        """The choice has drawn a token, not its last. `Guides.follow` makes the next mask."""
        self._untaken.append(token_id)
        self.mask = None

    def fork(self) -> Guide:
        """Another one at the same place, for a beam. Not between `Guides.follow` and the mask."""
        twin = Guide(self.constraint, self._matcher.deep_copy(), np.empty(0, np.uint32), self._lost)
        twin.mask, twin._untaken = self.mask, self._untaken[:]
        return twin

    def leaves_only(self, token_ids: Iterable[TokenId]) -> bool:
        """Whether the mask allows no token beside `token_ids`."""
        if self.mask is None:
            raise InternalError("a draw before its mask is there")
        others = self.mask.copy()
        for token_id in token_ids:
            others[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        return not others.any()

    def take(self) -> LLMatcher:
        """In the thread: the matcher, behind all tokens."""
        untaken, self._untaken = self._untaken, []
        self._matcher.consume_tokens(untaken)
        return self._matcher

    def settle(self, mask: TokenMask) -> bool:
        """Takes the mask that was made of `take`; False if the choice cannot go on, and `lost` was called."""
        if mask.any() and not self._matcher.is_error():
            self.mask = mask
            return True
        self.lose(InvalidRequest(f"sampling.{self.constraint.language}", "leaves nothing to write, or is too complex"))
        return False

    def lose(self, error: TandemError) -> None:
        """The choice cannot go on."""
        self._lost(error)


class Guides:
    """The guides of a worker."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._kept: OrderedDict[Constraint, tuple[LLMatcher, TokenMask]] = OrderedDict()
        """Used in the thread that compiles alone."""
        self._compiling, self._masking = _deep_thread("compile-grammars"), ThreadPoolExecutor(1, "token-masks")
        self._executor: LLExecutor | None = None
        self._behind: list[Guide] = []
        self._job: asyncio.Future[npt.NDArray[np.uint32]] | None = None

    def begin(
        self,
        constraint: Constraint,
        outputs: Sequence[tuple[TokenId, ...]],
        ready: Callable[[tuple[Guide, ...]], None],
        failed: Lost,
    ) -> None:
        """Calls `ready` with a guide for each of `outputs`, the tokens that a choice has already, or `failed`.

        `failed` may be called after `ready`, too, and for each choice that cannot go on.
        """

        def done(job: asyncio.Future[tuple[Guide, ...]]) -> None:
            if job.cancelled():
                return
            error = job.exception()
            if error is None:
                ready(job.result())
            elif isinstance(error, TandemError):
                failed(error)
            else:
                _log.error("a grammar could not be compiled", exc_info=error)
                failed(InternalError(f"a grammar: {type(error).__name__}"))

        work = partial(self._begun, constraint, outputs, failed)
        asyncio.get_running_loop().run_in_executor(self._compiling, work).add_done_callback(done)

    def follow(self, guides: Iterable[Guide | None]) -> None:
        """Queues guides without a mask, which have new tokens: the next `start` makes their masks."""
        self._behind.extend(each for each in guides if each is not None and each.mask is None)

    def start(self, on_made: Callable[[], None]) -> None:
        """Has the masks of all who are behind made, unless that is under way; then calls `on_made`."""
        if self._job is not None or not self._behind:
            return
        guides, self._behind = self._behind, []
        self._job = asyncio.get_running_loop().run_in_executor(self._masking, self._masks, guides)
        self._job.add_done_callback(partial(self._made, guides, on_made))

    async def settled(self) -> None:
        """Returns when no masks are being made, or after MASKS_WITHIN_S."""
        if self._job is not None:
            await asyncio.wait({self._job}, timeout=MASKS_WITHIN_S)

    def close(self) -> None:
        """Ends its threads; work under way is finished unheard."""
        for thread in (self._compiling, self._masking):
            thread.shutdown(wait=False, cancel_futures=True)

    def _made(
        self, guides: list[Guide], on_made: Callable[[], None], job: asyncio.Future[npt.NDArray[np.uint32]]
    ) -> None:
        self._job = None
        if job.cancelled():
            return
        if (error := job.exception()) is not None:
            _log.error("token masks could not be made", exc_info=error)
            for guide in guides:
                guide.lose(InternalError(f"token masks: {type(error).__name__}"))
        else:
            for guide, mask in zip(guides, job.result(), strict=True):
                if not guide.settle(mask):  # what its matchers share has grown: the next request begins afresh
                    self._compiling.submit(self._kept.pop, guide.constraint, None)
        self.start(on_made)
        on_made()

    # --- in the threads ---

    def _begun(self, constraint: Constraint, outputs: Sequence[tuple[TokenId, ...]], failed: Lost) -> tuple[Guide, ...]:
        """Raises InvalidRequest, CheckpointError."""
        if constraint not in self._kept:
            matcher = self._compiler.compile(constraint)
            self._kept[constraint] = matcher, self._mask(matcher)
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(constraint)
        matcher, mask = self._kept[constraint]
        guides = []
        for output in outputs:
            own = matcher.deep_copy()
            if output and not own.consume_tokens(list(output)):
                raise InvalidRequest("choices", "tokens that the constraint does not allow")
            guides.append(Guide(constraint, own, self._mask(own) if output else mask, failed))
        return tuple(guides)

    def _mask(self, matcher: LLMatcher) -> TokenMask:
        # The library gives a word too many where the vocabulary fills its words, and tokens that the logits lack.
        return np.frombuffer(matcher.compute_bitmask(), dtype="<u4")[: self._compiler.num_mask_words]

    def _masks(self, guides: list[Guide]) -> npt.NDArray[np.uint32]:
        masks = np.zeros((len(guides), self._compiler.num_library_words), dtype=np.int32)  # [M, W]
        matchers = [(guide.take(), row) for row, guide in enumerate(guides)]
        if self._executor is None:
            self._executor = LLExecutor(min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0))))
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        return masks.view(np.uint32)[:, : self._compiler.num_mask_words]


def _deep_thread(name: str) -> ThreadPoolExecutor:
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, name)
        pool.submit(int).result()  # begins the thread
    finally:
        threading.stack_size(before)
    return pool
