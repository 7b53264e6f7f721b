"""One request's KV blocks on their way to a decode worker: lends them to the sender and takes them back.

    WAITING → OPENING → PUSHING → COMMITTING → COMMITTED
       └─────────┴─────────┴──────────┴─────→ FAILED | ABORTED

A transfer waits for `grant`: where to, and by which right. The grant comes while the first chunk computes, or much
later if the decode worker is full; lent blocks wait until then. Opening says which block the decode worker needs first;
blocks before it are not sent. `lend` hands over blocks that will not change any more; they are pushed while the next
chunk computes. Each lent block is retained in the pool from `lend` until its push has returned, or, after a failure,
until the sender can no longer read it.

Does not know steps or routers. All on the loop; nothing blocks it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from kvtransfer.base import Handoff, Sender, TransferReport
from shell.telemetry.events import TransferStarted
from shell.telemetry.logging import get_logger
from tandem.errors import TandemError, TransferError
from tandem.types import BlockId
from worker.request import Request

_log = get_logger(__name__)


_OPEN_TIMEOUT_S = 5.0
"""Longest time for connecting, as long as a lease. Pushes may take any time while bytes move."""


class OutgoingOwner(Protocol):
    """The owner of a transfer hears how it went: by one of the first two calls, or by neither after `abort`."""

    def transfer_committed(self, request: Request, report: TransferReport) -> None:
        """The other worker has verified and attached all blocks."""

    def request_failed(self, request: Request, error: TandemError) -> None:
        """Nothing of the request will be decoded."""

    def blocks_returned(self, request: Request) -> None:
        """Lent blocks were released; for the last time once the transfer `has_ended`."""


class OutgoingTransfer:
    """The transfer of a prompt's KV, or of a running request's."""

    def __init__(self, request: Request, sender: Sender, pool: BlockPool, owner: OutgoingOwner) -> None:
        self._request = request
        self._sender = sender
        self._pool = pool
        self._owner = owner
        self._num_pushed = 0
        """Blocks of the table that were pushed, or that the decode worker holds already."""
        self._lent: list[BlockId] = []
        """Blocks after the pushed ones that are retained here."""
        self._payload: bytes | None = None
        """Payload of the commit, once nothing more will be lent."""
        self._work = asyncio.Event()
        self._granted: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()
        """Ticket and endpoint."""
        self._task: asyncio.Task[None] | None = None
        self._aborted = False
        self._closing = False
        """Whether the commit is done, or the sender ends its use of the blocks: a cancel must not interrupt that."""

    def start(self) -> None:
        """Begins to wait for `grant`, in a task of its own."""
        self._task = asyncio.create_task(self._run(), name="transfer")
        self._task.add_done_callback(self._ended)

    def grant(self, ticket: bytes, kv_endpoint: bytes) -> None:
        """Opens the transfer with what the decode worker minted and the router carried. The first grant counts."""
        if not self._granted.done():
            self._granted.set_result((ticket, kv_endpoint))

    @property
    def is_granted(self) -> bool:
        """Returns whether the transfer was granted."""
        return self._granted.done()

    @property
    def num_lent(self) -> int:
        """Returns the number of blocks that are retained here."""
        return len(self._lent)

    @property
    def has_ended(self) -> bool:
        """Returns whether the task has ended and every block was given back."""
        return self._task is None

    def lend(self, num_finished: int) -> None:
        """Retains the first `num_finished` blocks of the prompt, but for those already lent, and pushes them.

        Does nothing after the transfer has ended.
        """
        if self._takes_blocks():
            self._lend_up_to(num_finished, self._request.group.prefix)

    def finish(self, num_blocks: int, payload: bytes, of_choice: Sequence | None = None) -> None:
        """Lends the rest of its first `num_blocks` blocks, of the prefix or of a choice that runs on its own.

        Commits with `payload` once all are pushed.
        """
        if self._takes_blocks():
            self._lend_up_to(num_blocks, of_choice or self._request.group.prefix)
            self._payload = payload
            self._work.set()

    def abort(self) -> None:
        """Gives the transfer up without a report. Idempotent; blocks are released once the sender reads none."""
        if self._task is None or self._aborted:
            return
        self._aborted = True
        if not self._closing:
            self._task.cancel()

    def _takes_blocks(self) -> bool:
        return self._task is not None and not self._task.done()

    def _lend_up_to(self, num_finished: int, sequence: Sequence) -> None:
        blocks = sequence.block_table[self._num_pushed + len(self._lent) : num_finished]
        if blocks:
            self._pool.retain(blocks)
            self._lent.extend(blocks)
            self._work.set()

    async def _run(self) -> None:
        try:
            report = await self._transfer(*await self._granted)
        except TandemError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the task's root: a bug must not become a hang
            _log.exception("a hand-off broke", request_id=self._request.spec.request_id)
            self._fail(TransferError(f"transfer broke: {type(error).__name__}"))
        else:
            self._owner.transfer_committed(self._request, report)

    def _fail(self, error: TandemError) -> None:
        self._closing = True
        if not self._aborted:
            self._owner.request_failed(self._request, error)

    async def _transfer(self, ticket: bytes, kv_endpoint: bytes) -> TransferReport:
        handoff = await self._sender.open(ticket, kv_endpoint, _OPEN_TIMEOUT_S)
        try:
            self._give_back(handoff.first_block)  # what the decode worker holds already, as far as it was lent
            self._num_pushed = handoff.first_block
            payload = await self._push_all(handoff)
            return await handoff.commit(payload)
        finally:
            self._closing = True
            await handoff.abort()  # nothing to do after a commit; else it ends the reading of lent blocks

    async def _push_all(self, handoff: Handoff) -> bytes:
        """Returns the payload of the commit, once every block was pushed."""
        payload = await self._next()
        self._request.events.emit(TransferStarted())
        while self._lent:
            blocks = tuple(self._lent)
            await handoff.push(self._num_pushed, blocks)
            self._num_pushed += len(blocks)
            self._give_back(len(blocks))
            payload = await self._next()
        return payload

    async def _next(self) -> bytes:
        """Waits for blocks to push; returns the payload of the commit if none will follow."""
        while not self._lent and self._payload is None:
            self._work.clear()
            await self._work.wait()
        return self._payload or b""

    def _give_back(self, num_blocks: int) -> None:
        """Releases the first `num_blocks` lent blocks."""
        blocks, self._lent = self._lent[:num_blocks], self._lent[num_blocks:]
        self._pool.release(blocks)
        self._owner.blocks_returned(self._request)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        # In a callback, because a task cancelled before its first step runs no `finally`.
        self._task = None
        self._give_back(len(self._lent))
