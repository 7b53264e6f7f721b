"""Hand-offs between the pools of two fake engines, in one loop: they copy tokens, and take no time."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.base import BlockRef, HandoffListener, Offer, TransferReport
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.token_engine import FakeEngine

BLOCK_SIZE = 4


class Wire:
    """Receiver, sender and all its hand-offs."""

    def __init__(self, source: FakeEngine, target: FakeEngine) -> None:
        self._source, self._target = source, target
        self._offers: dict[str, tuple[tuple[BlockRef, ...], HandoffListener, int]] = {}
        """Blocks, whom to tell, and the position of the first block."""
        self._num_offers = 0

    @property
    def num_live(self) -> int:
        return len(self._offers)

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        self._num_offers += 1
        name = str(self._num_offers)
        self._offers[name] = blocks, listener, first_block
        return Offer(name, name.encode(), b"endpoint")

    def withdraw(self, transfer_id: str) -> None:
        if transfer_id in self._offers:
            _, listener, _ = self._offers.pop(transfer_id)
            listener.on_failed(TransferError("withdrawn"))
            listener.on_writer_stopped()

    def reap(self) -> None: ...

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> WireHandoff:
        return WireHandoff(self, ticket.decode())

    def copy(self, name: str, first: int, source_blocks: Sequence[BlockId]) -> None:
        blocks, _, first_block = self._offers[name]
        assert first >= first_block
        targets = blocks[first - first_block :][: len(source_blocks)]
        for source, target in zip(source_blocks, targets, strict=True):
            for at in range(BLOCK_SIZE):
                if (source, at) in self._source.slots:
                    self._target.slots[target.block_id, at] = self._source.slots[source, at]

    def first_block(self, name: str) -> int:
        return self._offers[name][2]

    def listener(self, name: str) -> HandoffListener:
        if name not in self._offers:
            raise TransferError("it was withdrawn")
        return self._offers[name][1]

    def commit(self, name: str, payload: bytes) -> None:
        listener = self.listener(name)
        del self._offers[name]
        listener.on_committed(payload)


class WireHandoff:
    """One hand-off: nothing of it takes any time."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        wire.listener(name).on_receiving()
        self.first_block = wire.first_block(name)

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        self._wire.copy(self._name, first, source_blocks)

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        self._wire.commit(self._name, first_token_payload)
        return TransferReport("wire", 0, 0, 0.0)

    async def abort(self) -> None: ...
