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
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvtransfer.base import TransferReport
from kvtransfer.connection import Connection
from kvtransfer.frame import Frame, FrameType
from kvtransfer.messages import (
    MAX_CHECKSUMS_PER_WRITE,
    OUT_OF_MEMORY,
    Commit,
    Write,
    decode_error,
    decode_window,
    digest_of,
)
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan, Ring, give_up
from kvtransfer.ticket import Ticket
from kvtransfer.transport import SendingLane
from shell.clock import Clock
from tandem.errors import FrameError, PeerLost, TransferError
from tandem.types import BlockId

PIECES_AHEAD = 2
"""Pieces of one hand-off that are placed at a time: its thread has the next one at hand while a WRITE is on its way."""

T = TypeVar("T")


class _Placing(NamedTuple):
    """A piece on its way: its first position, and what `placed` yields its checksums."""

    first: int
    sources: tuple[BlockId, ...]
    loan: Loan
    placed: asyncio.Future[tuple[int, ...]]


class OutgoingHandoff:
    """Implements `base.Handoff`; `handle` and `end` are called by its link."""

    def __init__(
        self,
        ticket: Ticket,
        connection: Connection,
        lane: SendingLane,
        pool: Pool,
        clock: Clock,
        on_drained: Callable[[int], object],
    ) -> None:
        """`on_drained` gets the ticket's number once DRAINED was said: nothing follows."""
        self._ticket = ticket
        self._connection = connection
        self._lane = lane
        self._pool = pool
        self._clock = clock
        self._on_drained = on_drained
        self._num_grains = lane.num_grains
        self._checksums = np.zeros((len(ticket.blocks), self._num_grains), np.uint64)
        """Checksums of the placed blocks, in the offer's order: `[n, grains]`."""
        self._is_pushed, self._is_placed = np.zeros((2, len(ticket.blocks)), bool)
        self._window = 0
        """WRITEs that may be unanswered at a time; 0 = the ticket is not accepted yet."""
        self._unanswered = 0
        self._loans: deque[Loan] = deque()
        """Loans of unanswered WRITEs, in the order of these WRITEs."""
        self._placed: list[Loan] = []
        """Loans of pieces that are not announced."""
        self._num_writes = 0
        self._num_spans = 0
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
        """Shows the ticket; returns once the ticket is accepted. Raises TransferError."""
        self._connection.send(Frame(FrameType.OPEN, self._ticket.number, payload=self._ticket.encode()), urgent=True)
        await self._until(lambda: self._window > 0)

    async def push(self, first: int, source_blocks: tuple[BlockId, ...]) -> None:
        """See `base.Handoff.push`. After a cancelled push, sources are lent until `abort` returns."""
        started_s = self._clock.now_s()
        self._claim(first, source_blocks)
        at_most = max(1, self._lane.piece_bytes // self._pool.block_bytes)
        step = min(MAX_CHECKSUMS_PER_WRITE // self._num_grains, at_most)
        placing: deque[_Placing] = deque()
        sending: list[asyncio.Future[None]] = []
        start = 0
        while start < len(source_blocks):
            if len(placing) == PIECES_AHEAD:
                await self._write(placing.popleft(), sending)
            loan = await self._borrow(min(step, len(source_blocks) - start), placing, sending)
            sources = source_blocks[start : start + loan.num_blocks]
            placing.append(self._place(first + start, sources, loan))
            start += len(sources)
        await self._write_all(placing, sending)
        for each in sending:
            await _result(each)
        self._busy_s += self._clock.now_s() - started_s

    async def commit(self, first_token_payload: bytes) -> TransferReport:
        """See `base.Handoff.commit`. A repeated call returns the same report."""
        started_s = self._clock.now_s()
        if not self._committed:
            self._raise_if_ended()
            commit = Commit(self._num_writes, digest_of(self._checksums[self._is_placed]), first_token_payload)
            self._send(FrameType.COMMIT, payload=commit.encode())
            await self._until(lambda: self._committed)
            self._busy_s += self._clock.now_s() - started_s
        num_blocks = len(self._checksums)  # committed, so that every one was pushed
        num_bytes = num_blocks * self._pool.block_bytes
        return TransferReport(
            self._lane.name, num_blocks, num_bytes, self._busy_s, self._lane.passed_over, self._num_spans
        )

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
                if self._loans:
                    self._loans.popleft().release()
            case FrameType.COMMITTED:
                self._committed = self._error is None
                self._release_if_quiet()
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
        """Ends the hand-off: nothing is sent from now on; waiting calls raise `error`. False if the hand-off had ended
        before.
        """
        if self._committed or self._error is not None:
            return False
        self._error = error
        self._changed.set()
        self._release_if_quiet()
        return True

    def _claim(self, first: int, sources: tuple[BlockId, ...]) -> None:
        """Each position is written once: a second copy would spoil what may be verified already."""
        end = first + len(sources)
        if not self._ticket.first_block <= first <= end <= self._ticket.end:
            offered = f"{self._ticket.first_block}:{self._ticket.end}"
            raise TransferError(f"positions {first}:{end} leave the offer of {offered}")
        if sources and not 0 <= min(sources) <= max(sources) < self._pool.num_blocks:
            raise TransferError(f"source blocks leave the pool of {self._pool.num_blocks}")
        span = self._span(first, len(sources))
        if self._is_pushed[span].any():
            raise TransferError(f"positions {first}:{end} were pushed before")
        self._is_pushed[span] = True

    def _span(self, first: int, num_blocks: int) -> slice:
        """Where positions lie in the offer."""
        start = first - self._ticket.first_block
        return slice(start, start + num_blocks)

    async def _borrow(self, num_blocks: int, placing: deque[_Placing], sending: list[asyncio.Future[None]]) -> Loan:
        """Waits until one more WRITE may be sent and has a loan; announces all of `placing` first if need be.

        For the answers to those, and the loans that these give back, may be what it waits for. Raises as `_until`; then
        holds nothing.
        """
        if self._unanswered >= self._window:
            await self._write_all(placing, sending)
            await self._until(lambda: self._unanswered < self._window)
        self._raise_if_ended()
        wanted = self._lane.reserve(num_blocks)
        wanted.add_done_callback(lambda _: self._changed.set())
        try:
            if not wanted.done():
                await self._write_all(placing, sending)
                await self._until(wanted.done, self._pool.leaving)
        except BaseException:
            give_up(wanted)
            raise
        self._unanswered += 1
        self._placed.append(wanted.result())
        return wanted.result()

    def _place(self, first: int, sources: tuple[BlockId, ...], loan: Loan) -> _Placing:
        targets: list[BlockId] = self._ticket.blocks.block_ids[self._span(first, len(sources))].tolist()
        placed = self._lend(asyncio.ensure_future(self._lane.place(sources, targets, loan)))
        return _Placing(first, sources, loan, placed)

    async def _write_all(self, placing: deque[_Placing], sending: list[asyncio.Future[None]]) -> None:
        while placing:
            await self._write(placing.popleft(), sending)

    async def _write(self, piece: _Placing, sending: list[asyncio.Future[None]]) -> None:
        """Announces a piece once it is placed; returns once those in `sending` have left, and puts it there instead."""
        checksums = await _result(piece.placed)
        self._raise_if_ended()
        span = self._span(piece.first, len(piece.sources))
        self._checksums[span] = np.array(checksums, np.uint64).reshape(-1, self._num_grains)
        self._is_placed[span] = True
        seq, self._num_writes = self._num_writes, self._num_writes + 1
        write = Write(piece.first, checksums, self._num_grains)
        frame = Frame(FrameType.WRITE, self._ticket.number, seq, write.encode())
        self._placed.remove(piece.loan)
        self._loans.append(piece.loan)
        sent = self._lane.announce(self._connection, frame, piece.sources, piece.loan)
        self._num_spans += piece.loan.num_spans
        before = tuple(sending)
        sending[:] = [] if sent is None else [self._lend(sent)]
        for each in before:
            await _result(each)

    def _lend(self, work: asyncio.Future[T]) -> asyncio.Future[T]:
        """Work on borrowed blocks; it is tracked to its end, whatever becomes of the caller."""
        self._in_flight.add(work)
        work.add_done_callback(self._returned)
        return work

    def _returned(self, work: asyncio.Future[T]) -> None:
        self._in_flight.discard(work)
        if not work.cancelled():
            work.exception()  # a cancelled caller never collects it
        self._release_if_quiet()
        if self._drained_due:
            self._say_drained()

    def _release_if_quiet(self) -> None:
        """Once it has ended: gives back what answers that will not come would have."""
        if (self._committed or self._error is not None) and not self._in_flight:
            for loan in (*self._placed, *self._loans):
                loan.release()
            self._placed.clear()
            self._loans.clear()

    def _say_drained(self) -> None:
        self._drained_due = bool(self._in_flight)
        if not self._drained_due:
            self._send(FrameType.DRAINED)
            self._on_drained(self._ticket.number)

    async def _until(self, ready: Callable[[], bool], others: Ring | None = None) -> None:
        """Waits for an answer. Raises the hand-off's error, or PeerLost once the connection stands still.

        Rows that other hand-offs give back to `others` are progress too.
        """
        seen = self._progress(others)
        while not ready():
            self._raise_if_ended()
            self._changed.clear()
            try:
                async with asyncio.timeout(self._connection.timing.reply_s):
                    await self._changed.wait()
            except TimeoutError:
                before, seen = seen, self._progress(others)
                if seen == before:
                    raise PeerLost(f"no answer for transfer {self._ticket.transfer_id}") from None
        self._raise_if_ended()

    def _progress(self, others: Ring | None) -> int:
        return self._connection.progress + (others.num_returned if others else 0)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _send(self, frame_type: FrameType, payload: bytes = b"") -> None:
        self._connection.send(Frame(frame_type, self._ticket.number, payload=payload))


async def _result(work: asyncio.Future[T]) -> T:
    """A cancelled caller leaves the work running. Work that found no memory fails its own hand-off."""
    await asyncio.wait({work})
    try:
        return work.result()
    except MemoryError as error:
        raise TransferError(OUT_OF_MEMORY) from error
