"""One prompt's blocks on their way to a decode worker: lends them to the sender and takes them back.

    OPENING → PUSHING → COMMITTING → COMMITTED
        └────────┴──────────┴─────→ FAILED | ABORTED

Opening starts at once, while the prompt still waits for its turn, so that a bad ticket is
found before anything is computed. `lend` hands over blocks that will not change any more;
they are pushed while the next chunk computes. Each lent block is retained in the pool from
`lend` until its push returned (or, after a failure, until the sender can no longer read it).

Does not know sequences, steps or routers. All on the loop; nothing blocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from kvtransfer.base import Handoff, Sender, TransferReport
from tandem.errors import InternalError, TandemError, TransferError
from tandem.first_token import encode_first_token
from tandem.types import BlockId, TokenId

TRANSFER_TIMEOUT_S = 60.0
"""Longest that one push or the commit may take; a silent peer is found out much sooner by the sender itself."""
OPEN_TIMEOUT_S = 5.0
"""Longest that connecting and showing the ticket may take."""


@dataclass(frozen=True, slots=True)
class HandoffPolicy:
    """How blocks are handed over."""

    overlap: bool = True
    """Push finished blocks while later ones compute; False pushes everything at the end."""
    open_timeout_s: float = OPEN_TIMEOUT_S
    transfer_timeout_s: float = TRANSFER_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Destination:
    """Where blocks go: what the decode worker minted and the router carried."""

    ticket: bytes
    endpoint: bytes


class BlockHandoff:
    """The hand-off of one prompt. Ends once: `on_committed`, `on_failed`, or neither after `abort`."""

    def __init__(
        self,
        sender: Sender,
        pool: BlockPool,
        policy: HandoffPolicy,
        on_started: Callable[[], None],
        on_committed: Callable[[TransferReport], None],
        on_failed: Callable[[TandemError], None],
        on_freed: Callable[[], None],
    ) -> None:
        """`on_started` is called once, before the first blocks are pushed.

        `on_freed` is called whenever lent blocks were given back, and last when the task is gone.
        """
        self._sender = sender
        self._pool = pool
        self._policy = policy
        self._on_started = on_started
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._on_freed = on_freed
        self._pending: list[BlockId] = []
        self._pushing: tuple[BlockId, ...] = ()
        self._num_lent = 0
        self._num_pushed = 0
        self._first_token: TokenId | None = None
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._abandoned = False
        """Nobody wants to hear of it any more."""
        self._closing = False
        """Committed, or the sender is being stopped: a cancel would only do harm."""

    def start(self, destination: Destination) -> None:
        """Begins to open, in a task of its own."""
        self._task = asyncio.create_task(self._run(destination), name="handoff")
        self._task.add_done_callback(self._ended)

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more and every block was given back."""
        return self._task is None

    def lend(self, block_table: Sequence[BlockId], num_finished: int) -> None:
        """Hands over the first `num_finished` blocks of the table, but for those already lent.

        Retains them. After the hand-off has ended, does nothing.
        """
        if self._task is None or self._task.done():
            return
        if self._policy.overlap:
            self._lend_up_to(block_table, num_finished)

    def finish(self, block_table: Sequence[BlockId], first_token: TokenId) -> None:
        """Hands over what is left of the table, then commits with the first token."""
        if self._task is None or self._task.done():
            return
        self._lend_up_to(block_table, len(block_table))
        self._first_token = first_token
        self._work.set()

    def abort(self) -> None:
        """Gives up without a report. Idempotent; blocks come back when the sender has let go."""
        if self._task is None or self._abandoned:
            return
        self._abandoned = True
        if not self._closing:
            self._task.cancel()

    def _lend_up_to(self, block_table: Sequence[BlockId], num_finished: int) -> None:
        blocks = block_table[self._num_lent : num_finished]
        if not blocks:
            return
        self._pool.retain(blocks)
        self._pending.extend(blocks)
        self._num_lent = num_finished
        self._work.set()

    async def _run(self, destination: Destination) -> None:
        try:
            report = await self._transfer(destination)
        except TimeoutError:
            self._fail(TransferError(f"hand-off stalled after {self._num_pushed} blocks"))
        except TandemError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the task's root: a bug must not become a hang
            self._fail(InternalError(f"hand-off broke: {type(error).__name__}"))
        else:
            self._on_committed(report)

    def _fail(self, error: TandemError) -> None:
        self._closing = True
        if not self._abandoned:
            self._on_failed(error)

    async def _transfer(self, destination: Destination) -> TransferReport:
        timeout_s = self._policy.open_timeout_s
        handoff = await self._sender.open(destination.ticket, destination.endpoint, timeout_s)
        try:
            first_token = await self._push_all(handoff)
            async with asyncio.timeout(self._policy.transfer_timeout_s):
                return await handoff.commit(encode_first_token(first_token))
        finally:
            self._closing = True
            await handoff.abort()  # nothing to do after a commit; else it ends the reading of lent blocks

    async def _push_all(self, handoff: Handoff) -> TokenId:
        while self._pending or self._first_token is None:
            if not self._pending:
                self._work.clear()
                await self._work.wait()
                continue
            if self._num_pushed == 0:
                self._on_started()
            self._pushing, self._pending = tuple(self._pending), []
            held = max(0, handoff.first_block - self._num_pushed)  # the decode worker has these already
            async with asyncio.timeout(self._policy.transfer_timeout_s):
                await handoff.push(self._num_pushed + held, self._pushing[held:])
            self._num_pushed += len(self._pushing)
            self._give_back()
        return self._first_token

    def _give_back(self) -> None:
        self._pool.release(self._pushing)
        self._pushing = ()
        self._on_freed()

    def _ended(self, _task: asyncio.Task[None]) -> None:
        # In a callback, because a task cancelled before its first step runs no `finally`.
        self._task = None
        self._pushing += tuple(self._pending)
        self._pending = []
        self._give_back()
