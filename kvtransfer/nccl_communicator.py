"""One rank of a communicator of two, on a thread of its own: all that NCCL does is waited for there, with a deadline.

    waiting for room → beginning → ready ⇄ moving → ended
          └────────────────┴─────────┴───────┴→ broken

Ended and broken are both reached through NCCL's abort: an orderly end waits for the peer, which may be gone. Once the
abort has returned, nothing of the communicator runs on the GPU, so nothing reads or writes the pool. An abort that does
not return proves nothing: then the process ends.

A broken communicator shuts the control connection down, so that both sides end it; the next hand-off dials again, which
is a new connection with a new communicator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kernels.cuda_driver import CudaDriver
from kvtransfer.lane_thread import LaneThread
from kvtransfer.nccl_library import NcclError, NcclLibrary
from kvtransfer.transport import TransportFull
from shell.clock import Deadline, MonotonicClock
from tandem.errors import PeerLost, TransferError
from tandem.logger import get_logger

T = TypeVar("T")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 20e-6, 2e-3
_EXIT_FAILED = 1
_MAX_CTAS = 4
"""Thread blocks that a communicator takes while it moves blocks: the rest of the GPU is the engine's."""
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL

_log = get_logger(__name__)


def end_process() -> None:
    """The last resort; never returns. Whoever supervises the process starts another, and the router replays."""
    _log.critical("nccl cannot be stopped: this process ends, so that no block is freed under a writer")
    os._exit(_EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a communicator runs on."""

    driver: CudaDriver
    library: NcclLibrary
    device: int
    """Ordinal."""


class Communicators:
    """All communicators of a process: how many there are, and the limits that each keeps."""

    def __init__(
        self,
        most: int = 8,
        begin_s: float = 30.0,
        move_s: float = 10.0,
        abort_s: float = 10.0,
        end_process: Callable[[], None] = end_process,
    ) -> None:
        """At most `most` at a time: each takes 52 to 100 MB of the GPU's memory, beside the pool.

        `move_s` is for one WRITE, as a wire that does not move it in `Timing.reply_s` stands still. After `abort_s`,
        `end_process` is called.
        """
        self.most: Final = most
        self.begin_s: Final = begin_s
        self.move_s: Final = move_s
        self.abort_s: Final = abort_s
        self.end_process: Final = end_process
        self.room: Final = threading.BoundedSemaphore(most)
        """Taken by each communicator until nothing of that communicator is left."""
        self.num_open = 0
        """Communicators that are not ended."""


class Communicator(LaneThread):
    """Moves device memory to or from one peer. Called on the loop; `end` is due once and does not wait."""

    def __init__(self, gpu: Gpu, all_: Communicators) -> None:
        """Raises TransportFull if `all_` are open that may be."""
        if all_.num_open >= all_.most:
            raise TransportFull(f"nccl has room for {all_.most} communicators, and none is idle")
        super().__init__("kv-nccl", self._end)
        all_.num_open += 1
        self._gpu = gpu
        self._all = all_
        self._given_up = threading.Event()
        self._sock: socket.socket | None = None
        self._hangups = select.poll()
        self._error: TransferError | None = None
        self._undo: Final = contextlib.ExitStack()
        self._handle = self._stream = self._event = 0
        self._peer = 0

    def watch(self, sock: socket.socket) -> None:
        """The control connection: waits end when it does, and it is shut down when the communicator breaks."""
        self._sock = sock
        self._hangups.register(sock, _HUNG_UP)

    async def unique_id(self) -> bytes:
        """For both ranks' `begin`. Raises TransferError."""
        asked = self.start(self._gpu.library.unique_id)
        await asyncio.wait({asked})
        try:
            return asked.result()
        except NcclError as error:
            raise TransferError(str(error)) from error

    def begin(self, unique_id: bytes, rank: int) -> asyncio.Future[None]:
        """Meets the other rank. The future carries PeerLost if that fails."""
        self._peer = 1 - rank
        return self.start(lambda: self._unless_broken(lambda: self._begin(unique_id, rank)))

    def move(self, addresses: Callable[[], Sequence[int]], num_bytes: int, *, send: bool) -> asyncio.Future[None]:
        """Sends from, or receives into, spans of `num_bytes` at these device addresses, behind all moves before it.

        Once the future is done, nothing reads or writes there. The future carries PeerLost if the move failed.
        """
        return self.start(lambda: self._unless_broken(lambda: self._move(addresses(), num_bytes, send)))

    def give_up(self) -> None:
        """Breaks what runs and all that follows. Idempotent."""
        self._given_up.set()

    def start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """See `LaneThread`. Nobody need wait for the work when the work fails."""
        started = super().start(work)
        started.add_done_callback(_collect)
        return started

    def end(self) -> asyncio.Future[None]:
        """Gives up, and frees everything once that has ended."""
        if self.ending is None:
            self._all.num_open -= 1
        self.give_up()
        return super().end()

    def _unless_broken(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            work()
        except RuntimeError as error:  # of NCCL, the driver or torch
            self._error = PeerLost(f"blocks cannot move by NCCL: {error}")
            self._abort()
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            raise self._error from error

    def _begin(self, unique_id: bytes, rank: int) -> None:
        begin_s, driver, library = self._all.begin_s, self._gpu.driver, self._gpu.library
        self._until(lambda: self._all.room.acquire(blocking=False), begin_s, "room for a communicator")
        self._undo.callback(self._all.room.release)
        context = driver.retain_context(self._gpu.device)
        self._undo.callback(driver.release_context, self._gpu.device)
        self._undo.enter_context(driver.current(context))
        self._stream = driver.stream_create()
        self._undo.callback(driver.stream_destroy, self._stream)
        self._event = driver.event_create()
        self._undo.callback(driver.event_destroy, self._event)
        self._handle = library.begin(unique_id, rank, _MAX_CTAS)
        self._until(lambda: library.is_ready(self._handle), begin_s, "to meet the peer")

    def _move(self, addresses: Sequence[int], num_bytes: int, send: bool) -> None:
        library, driver = self._gpu.library, self._gpu.driver
        queue = library.send if send else library.receive
        with library.grouped():
            for address in addresses:
                queue(self._handle, self._peer, address, num_bytes, self._stream)
        move_s = self._all.move_s
        self._until(lambda: library.is_ready(self._handle), move_s, "to begin a move")
        driver.event_record(self._event, self._stream)
        self._until(
            lambda: library.is_ready(self._handle) and driver.event_ended(self._event), move_s, "to move blocks"
        )

    def _until(self, ready: Callable[[], bool], most_s: float, what: str) -> None:
        """Polls `ready`: neither NCCL nor the driver has a wait that ends by a deadline or on another thread's call."""
        deadline, pause_s = Deadline.after(MonotonicClock(), most_s), _FIRST_PAUSE_S
        while not ready():
            if self._given_up.is_set():
                raise NcclError("it was given up here")
            if self._hangups.poll(0):
                raise NcclError("the connection has ended")
            if deadline.passed:
                raise NcclError(f"{what} took longer than {most_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _abort(self) -> None:
        """Returns only when nothing of the communicator runs on the GPU."""
        handle, self._handle = self._handle, 0
        if not handle:
            return
        watchdog = threading.Timer(self._all.abort_s, self._all.end_process)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._gpu.library.abort(handle)
            self._gpu.driver.stream_synchronize(self._stream)
        except RuntimeError as error:
            _log.critical("nccl communicator did not end", error=str(error))
            self._all.end_process()
        finally:
            watchdog.cancel()

    def _end(self) -> None:
        self._abort()
        try:
            self._undo.close()
        except RuntimeError as error:
            _log.error("nccl device failed", error=str(error))


def _collect(work: asyncio.Future[T]) -> None:
    """Retrieves the error of the work, so that asyncio does not report an unread one."""
    if not work.cancelled():
        work.exception()
