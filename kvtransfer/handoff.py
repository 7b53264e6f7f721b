"""The sender's side of one offer: pieces, credit, commit, abort.

    opening → open → committing → committed
       └────────┴────────┴→ ended (refused, failed, withdrawn, aborted, peer lost)

No call has a deadline of its own: a wire may be slow. But the receiver answers what it was sent in the order in which
it came, so a wait ends with PeerLost once nothing at all moved on the connection for `Timing.reply_s`.

Source blocks are read only inside `_in_flight` work; DRAINED and ABORT are said only when
that is empty, because they let the receiver free the target blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from kvtransfer.base import TransferReport
from kvtransfer.frame import Frame, FrameType
from kvtransfer.local_pool import LocalPool
from kvtransfer.messages import MAX_BLOCKS_PER_WRITE, Commit, Write, decode_error, decode_window, digest_of
from kvtransfer.ticket import Ticket
from kvtransfer.timing import Timing
from kvtransfer.transport import FrameSink, SendingLane
from tandem.clock import Clock
from tandem.errors import FrameError, PeerLost, TransferError
from tandem.types import BlockId

PIECE_BYTES = 4 * 1024 * 1024
"""Most payload of one WRITE (at least one block), so that several hand-offs share a connection fairly."""

T = TypeVar("T")


class OutgoingHandoff:
    """Implements `base.Handoff`; `handle` and `end` are called by its link."""

    def __init__(
        self,
        ticket: Ticket,
        sink: FrameSink,
        lane: SendingLane,
        pool: LocalPool,
        clock: Clock,
        timing: Timing,
        progress: Callable[[], int],
    ) -> None:
        """`progress` grows while anything moves on the connection; see `Connection.progress`."""
        self._ticket = ticket
        self._sink = sink
        self._lane = lane
        self._pool = pool
        self._clock = clock
        self._timing = timing
        self._progress = progress
        self._checksums: dict[int, int | None] = {}
        """By position; None = pushed and not placed yet."""
        self._window = 0
        """WRITEs that may be unanswered at a time; 0 = the ticket is not accepted yet."""
        self._unanswered = 0
        self._num_writes = 0
        self._busy_s = 0.0
        self._committed = False
        self._error: TransferError | None = None
        self._drained_due = False
        self._changed = asyncio.Event()
        self._in_flight: set[asyncio.Future[Any]] = set()

    @property
    def first_block(self) -> int:
        """See `base.Handoff.first_block`."""
        return self._ticket.first_block

    async def show(self) -> None:
        """Shows the ticket; returns once it is accepted. Raises TransferError."""
        self._sink.send(Frame(FrameType.OPEN, self._ticket.number, payload=self._ticket.encode()), urgent=True)
        await self._until(lambda: self._window > 0)

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        """See `base.Handoff.push`. After a cancelled push, sources are lent until `abort` returns."""
        started_s = self._clock.now_s()
        self._claim(first, source_blocks)
        step = min(MAX_BLOCKS_PER_WRITE, max(1, PIECE_BYTES // self._pool.block_bytes))
        for start in range(0, len(source_blocks), step):
            await self._until(lambda: self._unanswered < self._window)
            self._unanswered += 1
            await self._write(first + start, source_blocks[start : start + step])
        self._busy_s += self._clock.now_s() - started_s

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """See `base.Handoff.commit`. Repeated, it returns the same report."""
        started_s = self._clock.now_s()
        if not self._committed:
            self._raise_if_ended()
            digest = digest_of([known for _, known in sorted(self._checksums.items()) if known is not None])
            commit = Commit(self._num_writes, digest, first_token_payload)
            self._send(FrameType.COMMIT, payload=commit.encode())
            await self._until(lambda: self._committed)
            self._busy_s += self._clock.now_s() - started_s
        num_blocks = len(self._checksums)  # committed, so that every one was placed
        return TransferReport(self._lane.name, num_blocks, num_blocks * self._pool.block_bytes, self._busy_s)

    async def abort(self) -> None:
        """See `base.Handoff.abort`."""
        if self._committed:
            return
        first_time = self.end(TransferError("the hand-off was aborted"))
        await self.quiet()
        if first_time:
            self._send(FrameType.ABORT)

    async def quiet(self) -> None:
        """Returns once nothing of this hand-off reads sources or writes targets."""
        while self._in_flight:
            await asyncio.wait(tuple(self._in_flight))

    def handle(self, frame: Frame) -> None:
        """Takes the receiver's answer. Raises FrameError on a frame that no receiver says."""
        match frame.type:
            case FrameType.OPEN_OK:
                self._window = decode_window(frame.payload)
            case FrameType.WRITE_OK:
                self._unanswered = max(0, self._unanswered - 1)
            case FrameType.COMMITTED:
                self._committed = self._error is None
            case FrameType.REFUSED:
                self.end(decode_error(frame.payload))
            case FrameType.FAILED | FrameType.WITHDRAWN:
                self.end(decode_error(frame.payload))
                self._say_drained()
            case FrameType.DRAINED:
                pass
            case _:
                raise FrameError(f"a receiver does not say {frame.type.name}")
        self._changed.set()

    def end(self, error: TransferError) -> bool:
        """Nothing is sent any more; waiting calls raise `error`. False if it had ended before."""
        if self._committed or self._error is not None:
            return False
        self._error = error
        self._changed.set()
        return True

    def _claim(self, first: int, sources: tuple[BlockId, ...]) -> None:
        """Each position is written once: a second copy would spoil what may be verified already."""
        end = first + len(sources)
        if not self._ticket.first_block <= first <= end <= self._ticket.end:
            offered = f"{self._ticket.first_block}:{self._ticket.end}"
            raise TransferError(f"positions {first}:{end} leave the offer of {offered}")
        if not all(0 <= block_id < self._pool.num_blocks for block_id in sources):
            raise TransferError(f"source blocks leave the pool of {self._pool.num_blocks}")
        if any(position in self._checksums for position in range(first, end)):
            raise TransferError(f"positions {first}:{end} were pushed before")
        self._checksums.update(dict.fromkeys(range(first, end)))

    async def _write(self, first: int, sources: tuple[BlockId, ...]) -> None:
        start = first - self._ticket.first_block
        targets = self._ticket.blocks[start : start + len(sources)]
        checksums = await self._lend(asyncio.ensure_future(self._lane.place(sources, targets)))
        self._raise_if_ended()
        self._checksums.update(enumerate(checksums, first))
        seq, self._num_writes = self._num_writes, self._num_writes + 1
        write = Frame(FrameType.WRITE, self._ticket.number, seq, Write(first, checksums).encode())
        sent = self._lane.announce(self._sink, write, sources)
        if sent is not None:
            await self._lend(sent)

    async def _lend(self, work: asyncio.Future[T]) -> T:
        """Awaits work on borrowed blocks; if the caller is cancelled, the work is still tracked."""
        self._in_flight.add(work)
        work.add_done_callback(self._returned)
        await asyncio.wait({work})
        return work.result()

    def _returned(self, work: asyncio.Future[T]) -> None:
        self._in_flight.discard(work)
        if not work.cancelled():
            work.exception()  # a cancelled caller never collects it
        if self._drained_due:
            self._say_drained()

    def _say_drained(self) -> None:
        self._drained_due = bool(self._in_flight)
        if not self._drained_due:
            self._send(FrameType.DRAINED)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Waits for an answer. Raises the hand-off's error, or PeerLost once the connection stands still."""
        seen = self._progress()
        while not ready():
            self._raise_if_ended()
            self._changed.clear()
            try:
                async with asyncio.timeout(self._timing.reply_s):
                    await self._changed.wait()
            except TimeoutError:
                before, seen = seen, self._progress()
                if seen == before:
                    raise PeerLost(f"no answer for transfer {self._ticket.transfer_id}") from None
        self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _send(self, frame_type: FrameType, payload: bytes = b"") -> None:
        self._sink.send(Frame(frame_type, self._ticket.number, payload=payload))
