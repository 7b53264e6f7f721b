"""The right to write into reserved blocks, for one transfer. Pure.

Minted by the receiver, carried by the router unread, shown by the sender. The receiver keeps
what it minted; a ticket that differs from that in any byte is refused, so nothing in it has
to be trusted. The nonce makes it unguessable.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

import numpy as np

from kvtransfer.base import BlockRefs
from tandem.errors import TicketRefused
from tandem.types import Incarnation

TICKET_VERSION = 2
"""1: first version. 2: names the first block, so that an offer starts anywhere in its sequence."""
MAX_BLOCKS = 2**18
"""The most blocks of a sequence, blocks before `first_block` included."""
NONCE_BYTES = 16
_FIXED = struct.Struct("<BQ16s16s16sIII")
_MAX_EXPIRY_MS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """`number` names the transfer on the wire; `blocks` are positions `first_block:end` of the sequence's blocks."""

    number: int
    incarnation: Incarnation
    nonce: bytes
    layout_fingerprint: str
    expires_in_ms: int
    first_block: int
    """Blocks before it are the receiver's already: they are not offered and do not travel."""
    blocks: BlockRefs

    @property
    def end(self) -> int:
        """The position after the last position offered."""
        return self.first_block + len(self.blocks)

    @property
    def transfer_id(self) -> str:
        """The transfer's name outside this package."""
        return f"{self.number:016x}"

    def encode(self) -> bytes:
        """Fixed part, then all block ids (u32), then all generations (u64)."""
        n = len(self.blocks)
        fixed = _FIXED.pack(
            TICKET_VERSION,
            self.number,
            bytes.fromhex(self.incarnation),
            self.nonce,
            bytes.fromhex(self.layout_fingerprint),
            min(self.expires_in_ms, _MAX_EXPIRY_MS),
            self.first_block,
            n,
        )
        ids, generations = self.blocks.block_ids, self.blocks.generations
        return fixed + ids.astype("<u4").tobytes() + generations.astype("<u8").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Raises TicketRefused if the bytes are no ticket."""
        if len(data) < _FIXED.size:
            raise TicketRefused(f"ticket of {len(data)} bytes is too short")
        version, number, incarnation, nonce, layout, expires_in_ms, first_block, n = _FIXED.unpack_from(data)
        if version != TICKET_VERSION:
            raise TicketRefused(f"ticket has version {version}, not {TICKET_VERSION}")
        if not 0 < first_block + n <= MAX_BLOCKS or len(data) != _FIXED.size + 12 * n:
            raise TicketRefused(f"ticket of {len(data)} bytes does not hold {n} blocks from {first_block}")
        ids = np.frombuffer(data, "<u4", n, _FIXED.size).astype(np.uint32)
        generations = np.frombuffer(data, "<u8", n, _FIXED.size + 4 * n).astype(np.uint64)
        blocks = BlockRefs(ids, generations)
        return cls(number, Incarnation(incarnation.hex()), nonce, layout.hex(), expires_in_ms, first_block, blocks)


def check_shown(shown: bytes, minted: Ticket) -> None:
    """Raises TicketRefused, naming what differs, unless `shown` is `minted` byte for byte."""
    encoded = minted.encode()
    if hmac.compare_digest(shown, encoded):
        return
    ticket = Ticket.decode(shown)
    if not hmac.compare_digest(ticket.nonce, minted.nonce):
        raise TicketRefused(f"ticket of transfer {minted.transfer_id} has a wrong nonce")
    if ticket.incarnation != minted.incarnation:
        raise TicketRefused(f"ticket of transfer {minted.transfer_id} is of another incarnation")
    if (ticket.first_block, ticket.blocks) != (minted.first_block, minted.blocks):
        raise TicketRefused(f"ticket of transfer {minted.transfer_id} names other blocks or generations")
    raise TicketRefused(f"ticket of transfer {minted.transfer_id} was altered")
