"""One end of a link in NIXL: an agent on a thread of its own, which moves bytes and sleeps in between."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.lane_thread import LaneThread
from kvtransfer.plan import Plan
from kvtransfer.pool import Pool
from shell.config import keep_ucx_off_other_processes
from tandem.errors import InternalError, PeerLost, TransferError
from tandem.logger import get_logger

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Any one of them will do; the first only chooses among the others, by torch's CUDA."""
_BACKEND = "UCX"
_POLL_S = 0.0003
"""Between two looks at a transfer. Over TCP rare looks are no slower than incessant ones: each takes in more."""
_DONE, _UNDER_WAY = "DONE", "PROC"

T = TypeVar("T")

_log = get_logger(__name__)


def package() -> str:
    """Returns the name of the installed package."""
    return next(filter(importlib.util.find_spec, PACKAGES), PACKAGES[0])


@cache
def load() -> Any:
    """NIXL's Python module, once UCX was seen to start: the first link of a process should not wait for that.

    Raises ImportError if it is not installed, or what it needs is missing; TransferError if UCX does not start.
    """
    keep_ucx_off_other_processes()
    raise_exceptions = logging.raiseExceptions
    module = importlib.import_module(f"{package()}._api")
    logging.raiseExceptions = raise_exceptions  # the import sets it
    logging.getLogger("nixl").setLevel(logging.WARNING)
    _without_frames(lambda: _made(module))
    return module


class Region(NamedTuple):
    """Where a pool's blocks lie in its process, as NIXL counts memory."""

    memory: str  # DRAM or VRAM
    device: int
    addresses: tuple[int, ...]
    """Address of block 0 in each part, by rank."""
    num_blocks: int


class _Grains(NamedTuple):
    """A grain of every block, among the prepared grains of a side."""

    first: int
    step: int

    def of(self, blocks: Sequence[int]) -> npt.NDArray[np.int32]:
        """`[n]`."""
        return np.array(blocks, np.int32) * self.step + self.first


class _Piece:
    """A write into the peer's blocks."""

    def __init__(self, sources: Sequence[int], targets: Sequence[int], digests: Callable[[], tuple[int, ...]]) -> None:
        self.sources = sources
        self.targets = targets
        self.digests = digests
        """Digests the sources; called while the sources are on their way."""
        self.checksums: tuple[int, ...] = ()
        self.transfer: Any = None
        """NIXL's, once it has begun; `state` is what NIXL said of it last."""
        self.state = _UNDER_WAY
        self.arrived = False

    def release(self) -> None:
        """Gives NIXL's transfer back, which would keep the agent alive: also where NIXL refuses, as it may."""
        transfer, self.transfer = self.transfer, None
        transfer.release()


class Agent(LaneThread):
    """One end of a link in NIXL: `open`, then what `start` is given, then `end`.

    No exception of NIXL's leaves it: the frames that come with one would keep the agent alive.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__("kv-nixl", self.drop)
        self._layout = pool.fingerprints.layout
        parts = [torch.from_numpy(part.array) for part in pool.parts] if pool.device is None else [pool.device.blocks]
        self._parts = parts  # held, so that the memory outlives the agent
        self._nixl: Any = None
        self._region: Any = None
        self._sides: list[Any] = []
        """Our grains and the peer's, prepared: a piece is then two lists of their numbers."""
        self._moves: list[tuple[_Grains, _Grains]] = []
        """From where to where each grain of a block goes."""
        self._due: deque[_Piece] = deque()
        self._under_way: list[_Piece] = []

    @property
    def region(self) -> Region:
        """Where the blocks lie."""
        blocks = self._parts[0]
        device, addresses = blocks.get_device() if blocks.is_cuda else 0, tuple(part.data_ptr() for part in self._parts)
        return Region("VRAM" if blocks.is_cuda else "DRAM", device, addresses, len(blocks))

    def start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work`, which calls the methods below, after all that was started before. Raises TransferError."""
        return super().start(partial(_without_frames, work))

    def end(self) -> asyncio.Future[None]:
        """Ends the agent after all that was started. Idempotent. When it is done, nobody writes the rows by it."""
        if self.ending is None:
            super().end().add_done_callback(_log_failure)
        return super().end()

    def open(self) -> bytes:
        """Registers the blocks. Returns what a peer needs to write there."""
        self._nixl = _made(load())
        region = self.region
        self._region = self._nixl.register_memory(
            [(part.data_ptr(), part.nbytes, region.device, "") for part in self._parts], region.memory
        )
        metadata: bytes = self._nixl.get_agent_metadata()
        return metadata

    def join(self, metadata: bytes, theirs: Region) -> None:
        """Makes the blocks of a peer a target for `write`."""
        peer, ours = self._nixl.add_remote_agent(metadata), self.region
        plan = Plan.between(self._layout, len(ours.addresses), len(theirs.addresses))
        size, numbers = self._layout.block_bytes // plan.num_grains, []
        for agent, region, spans in (("NIXL_INIT_AGENT", ours, plan.source), (peer, theirs, plan.target)):
            counts = [region.num_blocks * len(span.grains) for span in spans]
            parts = zip(spans, counts, strict=True)
            strided = [(region.addresses[span.rank], size, region.device, size, count) for span, count in parts]
            self._sides.append(self._nixl.prep_xfer_dlist(agent, np.array(strided, np.uint64), region.memory))
            firsts = np.cumsum([0, *counts]).tolist()
            numbers.append({span.rank: (first, len(span.grains)) for span, first in zip(spans, firsts, strict=False)})
        for move in plan.moves():
            (first, step), (to, to_step) = numbers[0][move.source], numbers[1][move.target]
            self._moves.append((_Grains(first + move.source_place, step), _Grains(to + move.target_place, to_step)))

    def write(
        self, sources: Sequence[int], targets: Sequence[int], digests: Callable[[], tuple[int, ...]], patience_s: float
    ) -> asyncio.Future[tuple[int, ...]]:
        """Writes blocks into the peer's, beside other writes; called on the loop. Returns `digests()`, once they have
        arrived. The future carries PeerLost if nothing arrived for `patience_s`.

        Whatever it carries, some bytes may still be on their way, but the sources are no longer read.
        """
        piece = _Piece(sources, targets, digests)
        self._due.append(piece)
        return self.start(partial(self._finish, piece, patience_s))

    def take_in(self, stop: threading.Event) -> None:
        """Lets peers write, where that takes doing, until `stop` is set."""
        while not stop.wait(_POLL_S):
            self._nixl.get_new_notifs()

    def drop(self) -> None:
        """Releases everything that is NIXL's, at once. Idempotent. Raises InternalError if somebody still holds it.

        What NIXL refuses to release, such as a transfer under way, goes with the agent.
        """
        if self._nixl is None:
            return
        while self._under_way:
            _released(self._under_way.pop().release)
        while self._sides:
            _released(self._sides.pop().release)
        if self._region is not None:
            _released(partial(self._nixl.deregister_memory, self._region))
            self._region = None
        agent = weakref.ref(self._nixl.agent)
        self._nixl = None
        if agent() is not None:
            raise InternalError("an agent of NIXL outlives its link")

    def _finish(self, piece: _Piece, patience_s: float) -> tuple[int, ...]:
        try:
            return _without_frames(partial(self._drive, piece, patience_s))
        except TransferError:
            self.drop()
            raise

    def _drive(self, piece: _Piece, patience_s: float) -> tuple[int, ...]:
        """Until the piece has arrived; begins those behind it meanwhile, so that the wire always has work."""
        gives_up_s = time.monotonic() + patience_s
        while True:
            while self._due:
                self._begin(self._due.popleft())
            if self._settled():
                gives_up_s = time.monotonic() + patience_s
            if piece.arrived:
                return piece.checksums
            if not self._sides:
                raise PeerLost("the link to the peer's agent has ended")
            if time.monotonic() >= gives_up_s:
                raise PeerLost(
                    f"a write into the peer's blocks ended as {piece.state} after {patience_s:g} s without any progress"
                )
            time.sleep(_POLL_S)

    def _begin(self, piece: _Piece) -> None:
        if not self._sides:
            raise PeerLost("the link to the peer's agent has ended")
        ours, theirs = self._sides
        sources = np.concatenate([source.of(piece.sources) for source, _ in self._moves])
        targets = np.concatenate([target.of(piece.targets) for _, target in self._moves])
        piece.transfer = self._nixl.make_prepped_xfer("WRITE", ours, sources, theirs, targets)
        self._under_way.append(piece)
        piece.state = self._nixl.transfer(piece.transfer)
        piece.checksums = piece.digests()

    def _settled(self) -> bool:
        """Whether any write has ended since the last look."""
        under_way = self._under_way
        for piece in under_way:
            if piece.state == _UNDER_WAY:
                piece.state = self._nixl.check_xfer_state(piece.transfer)
        ended = [piece for piece in under_way if piece.state != _UNDER_WAY]
        for piece in ended:
            under_way.remove(piece)
            piece.release()
            if piece.state != _DONE:
                raise PeerLost(f"a write into the peer's blocks ended as {piece.state}")
            piece.arrived = True
        return bool(ended)


def _made(api: Any) -> Any:
    """Returns an agent without NIXL's own thread, which never sleeps."""
    return api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))


def _released(release: Callable[[], object]) -> None:
    try:
        _without_frames(release)
    except TransferError as error:
        _log.info("nixl resource released with its agent", error=error.message)


def _log_failure(ending: asyncio.Future[None]) -> None:
    """Retrieves the error, so that asyncio does not report an unread one; logs that error."""
    if not ending.cancelled() and (error := ending.exception()) is not None:
        _log.error("nixl agent did not end", error=str(error))


def _without_frames(work: Callable[[], T]) -> T:
    """What `work` returns. Any exception of NIXL's becomes a TransferError that refers to nothing of NIXL's."""
    try:
        return work()
    except InternalError:
        raise
    except Exception as error:  # noqa: BLE001 - NIXL's have no common class
        failure = PeerLost(error.message if isinstance(error, TransferError) else f"nixl: {error}")
    try:
        raise failure
    finally:
        del failure  # else this frame and the error hold each other, and what `work` holds, until a collection
