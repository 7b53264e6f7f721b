"""Hand-offs that move nothing and take as long as their bytes would: `kvtransfer.base` on a simulated clock.

A sender moves one push after the other. A worker that is lost takes its offers with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvtransfer.base import BlockRef, Handoff, HandoffListener, Offer, TransferReport
from shell.clock import Deadline
from simulator.costs import CostModel
from simulator.loop import SimulatedClock
from tandem.errors import TransferError
from tandem.types import BlockId

TRANSPORT = "simulated"


@dataclass(slots=True)
class _Offer:
    """An offer that has not ended."""

    receiver: SimulatedReceiver
    listener: HandoffListener
    first_block: int
    expires: Deadline
    is_shown: bool = False


class Network:
    """All offers of all pools, by ticket."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.num_bytes = 0
        """That were handed over."""
        self.offers: dict[str, _Offer] = {}
        self.names = count(1)

    def get(self, name: str) -> _Offer:
        """Returns an open offer. Raises TransferError if the offer has ended."""
        if name not in self.offers:
            raise TransferError("the offer has ended")
        return self.offers[name]

    def close(self, name: str) -> _Offer | None:
        """Ends an offer; returns None if the offer had ended before."""
        offer = self.offers.pop(name, None)
        if offer is not None:
            offer.receiver.num_live -= 1
        return offer

    def fail(self, name: str, why: str) -> None:
        """Idempotent."""
        offer = self.close(name)
        if offer is not None:
            offer.listener.on_failed(TransferError(why))
            offer.listener.on_writer_stopped()


class SimulatedReceiver:
    """A `kvtransfer.base.Receiver`."""

    def __init__(self, network: Network) -> None:
        self.num_live = 0
        self._network = network

    async def start(self) -> None:
        """See `Receiver`."""

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        """See `Receiver`."""
        name = f"transfer-{next(self._network.names)}"
        expires = Deadline.after(SimulatedClock(), expires_in_s)
        self._network.offers[name] = _Offer(self, listener, first_block, expires)
        self.num_live += 1
        return Offer(name, name.encode(), b"pool")

    def withdraw(self, transfer_id: str) -> None:
        """See `Receiver`."""
        self._network.fail(transfer_id, "it was withdrawn")

    def reap(self) -> None:
        """See `Receiver`."""
        if self.num_live:
            for name, offer in self._ours():
                if not offer.is_shown and offer.expires.passed:
                    self._network.fail(name, "the ticket ran out")

    async def stop(self) -> None:
        """See `Receiver`."""
        for name, _ in self._ours():
            self._network.fail(name, "the worker was lost")

    def _ours(self) -> list[tuple[str, _Offer]]:
        return [(name, offer) for name, offer in self._network.offers.items() if offer.receiver is self]


class SimulatedSender:
    """A `kvtransfer.base.Sender`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_s = 0.0

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> Handoff:
        """See `Sender`."""
        await asyncio.sleep(self._network.costs.handoff_s / 2)
        name = ticket.decode()
        offer = self._network.get(name)
        offer.listener.on_receiving()
        offer.is_shown = True
        return _Handoff(self._network, name, offer.first_block, self)

    async def stop(self) -> None:
        """See `Sender`."""

    async def move(self, num_bytes: int) -> None:
        """Returns when they have moved, behind all that were to be moved before."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(now_s, self._free_s) + num_bytes / self._network.costs.handoff_bytes_per_s
        self._network.num_bytes += num_bytes
        await asyncio.sleep(self._free_s - now_s)


class _Handoff:
    """A `kvtransfer.base.Handoff`."""

    def __init__(self, network: Network, name: str, first_block: int, sender: SimulatedSender) -> None:
        self.first_block = first_block
        self._network = network
        self._name = name
        self._sender = sender
        self._busy_s = 0.0
        """In pushes and the commit: waiting for the prompt's next chunk is no part of a hand-off's time."""
        self._num_blocks = 0

    async def push(self, first: int, source_blocks: Sequence[BlockId]) -> None:
        """See `Handoff`."""
        self._network.get(self._name)
        self._num_blocks += len(source_blocks)
        began_s = asyncio.get_running_loop().time()
        await self._sender.move(len(source_blocks) * self._block_bytes)
        self._busy_s += asyncio.get_running_loop().time() - began_s

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """See `Handoff`."""
        await asyncio.sleep(self._network.costs.handoff_s / 2)
        self._busy_s += self._network.costs.handoff_s / 2
        offer = self._network.get(self._name)
        self._network.close(self._name)
        offer.listener.on_committed(first_token_payload)
        return TransferReport(TRANSPORT, self._num_blocks, self._num_blocks * self._block_bytes, self._busy_s)

    async def abort(self) -> None:
        """See `Handoff`."""
        self._network.fail(self._name, "the writer gave up")

    @property
    def _block_bytes(self) -> int:
        costs = self._network.costs
        return costs.block_size * costs.kv_bytes_per_token
