"""Hand-offs of a pool that transports do not reach: each side copies blocks between it and rows that they do.

    StagedSender      push: copy_out, then the transport
    StagedReceiver    the transport, then copy_in, then `on_committed`

Wrap a sender or receiver over the reachable rows (`base.PoolMemory`); row i stands for block i.
Nothing else changes for either worker: source blocks may be reused once `push` has returned,
and blocks are whole in the pool once `on_committed` is called.

A hand-off whose copy_in is under way has ended for the receiver below: a withdrawal comes too
late, as one during `on_committed` would, and the listener still gets its one terminal call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.base import BlockRef, Handoff, HandoffListener, Offer, Receiver, Sender, TransferReport
from tandem.errors import TransferError
from tandem.types import BlockId


class Staging(Protocol):
    """Copies between pool and reachable rows. A call ends with its copy, even if cancelled; raises TransferError."""

    async def copy_out(self, block_ids: Sequence[BlockId]) -> None:
        """Pool → rows."""
        ...

    async def copy_in(self, block_ids: Sequence[BlockId]) -> None:
        """Rows → pool."""
        ...


def stage_sender(sender: Sender, staging: Staging | None) -> Sender:
    """Returns `sender` through `staging`; as it is if transports reach the pool itself (None)."""
    return sender if staging is None else StagedSender(sender, staging)


def stage_receiver(receiver: Receiver, staging: Staging | None) -> Receiver:
    """As `stage_sender`."""
    return receiver if staging is None else StagedReceiver(receiver, staging)


class StagedSender:
    """Implements `base.Sender`."""

    def __init__(self, sender: Sender, staging: Staging) -> None:
        self._sender = sender
        self._staging = staging

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> Handoff:
        """See `base.Sender.open`."""
        return _StagedHandoff(await self._sender.open(ticket, endpoint, timeout_s), self._staging)

    async def stop(self) -> None:
        """See `base.Sender.stop`."""
        await self._sender.stop()


class _StagedHandoff:
    """Implements `base.Handoff`."""

    def __init__(self, handoff: Handoff, staging: Staging) -> None:
        self._handoff = handoff
        self._staging = staging

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        """See `base.Handoff.push`."""
        await self._staging.copy_out(source_blocks)
        await self._handoff.push(first, source_blocks)

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """See `base.Handoff.commit`."""
        return await self._handoff.commit(first_token_payload)

    async def abort(self) -> None:
        """See `base.Handoff.abort`."""
        await self._handoff.abort()


class StagedReceiver:
    """Implements `base.Receiver`."""

    def __init__(self, receiver: Receiver, staging: Staging) -> None:
        self._receiver = receiver
        self._staging = staging
        self._copies: set[asyncio.Task[None]] = set()
        self._stopped = False

    @property
    def num_live(self) -> int:
        """See `base.Receiver.num_live`."""
        return self._receiver.num_live + len(self._copies)

    async def start(self) -> None:
        """See `base.Receiver.start`."""
        await self._receiver.start()

    def offer(self, blocks: tuple[BlockRef, ...], listener: HandoffListener, expires_in_s: float) -> Offer:
        """See `base.Receiver.offer`."""
        return self._receiver.offer(blocks, _StagedListener(self, blocks, listener), expires_in_s)

    def withdraw(self, transfer_id: str) -> None:
        """See `base.Receiver.withdraw`."""
        self._receiver.withdraw(transfer_id)

    def reap(self) -> None:
        """See `base.Receiver.reap`."""
        self._receiver.reap()

    async def stop(self) -> None:
        """See `base.Receiver.stop`; waits for copies under way, and fails their hand-offs."""
        self._stopped = True
        await self._receiver.stop()
        await asyncio.gather(*self._copies)

    def land(self, blocks: tuple[BlockRef, ...], listener: HandoffListener, first_token_payload: bytes) -> None:
        """Tells `listener` that it is committed once the blocks are in the pool."""
        copy = asyncio.get_running_loop().create_task(self._land(blocks, listener, first_token_payload), name="kv-land")
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    async def _land(self, blocks: tuple[BlockRef, ...], listener: HandoffListener, first_token_payload: bytes) -> None:
        try:
            await self._staging.copy_in([ref.block_id for ref in blocks])
            if self._stopped:
                raise TransferError("the receiver has stopped")
        except TransferError as error:
            listener.on_failed(error)
            listener.on_writer_stopped()
        else:
            listener.on_committed(first_token_payload)


class _StagedListener:
    """Implements `base.HandoffListener`."""

    def __init__(self, receiver: StagedReceiver, blocks: tuple[BlockRef, ...], listener: HandoffListener) -> None:
        self._receiver = receiver
        self._blocks = blocks
        self._listener = listener

    def on_receiving(self) -> None:
        """See `base.HandoffListener.on_receiving`."""
        self._listener.on_receiving()

    def on_committed(self, first_token_payload: bytes) -> None:
        """See `base.HandoffListener.on_committed`."""
        self._receiver.land(self._blocks, self._listener, first_token_payload)

    def on_failed(self, error: TransferError) -> None:
        """See `base.HandoffListener.on_failed`."""
        self._listener.on_failed(error)

    def on_writer_stopped(self) -> None:
        """See `base.HandoffListener.on_writer_stopped`."""
        self._listener.on_writer_stopped()
