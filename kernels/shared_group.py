"""Ranks that are processes of one host: they exchange tensors through shared memory and wait on its semaphores.

The memory is a memfd, so none but the processes that are given its descriptor reach it:

    [ header: abort flag | process id per rank | a semaphore per pair ] [ rank 0: half, half ] [ rank 1: half, half ] …

An exchange: a rank writes into its half, posts its semaphore of each peer, and waits for each peer's. Halves take
turns: when a rank has met all peers once more, they have read what it wrote before. A wait sleeps, and ends with
GroupBroken when the peer has died, does not come in time, or any rank has set the flag.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from collections.abc import Iterator, Sequence

import torch

from kernels.group import GroupBroken, tree_sum

HALF_BYTES = 1 << 20
"""Bytes exchanged at once: a decode step of 32 rows of 8192 sums; longer tensors go in pieces."""
MOST_RANKS = 8

_HEADER_BYTES = mmap.PAGESIZE
_PIDS_AT, _SEMAPHORES_AT = 64, 128
_SEMAPHORE_BYTES = 32  # of sem_t where pointers have 8 bytes
_SLICE_S = 0.02
"""How long a sleep lasts before the flag and the peer's process are looked at."""

_libc = ctypes.CDLL(None, use_errno=True)
"""Calls release the GIL."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def create_group_memory(size: int) -> int:
    """Makes the memory of `size` ranks; returns its descriptor, which the caller closes."""
    descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _HEADER_BYTES + size * 2 * HALF_BYTES)
    with mmap.mmap(descriptor, _HEADER_BYTES) as header:
        start = ctypes.c_char.from_buffer(header)
        for pair in range(size * size):
            at = ctypes.addressof(start) + _SEMAPHORES_AT + pair * _SEMAPHORE_BYTES
            if _libc.sem_init(ctypes.c_void_p(at), 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init of a shared semaphore")
        del start  # else the mapping cannot be closed
    return descriptor


class SharedGroup:
    """Implements `kernels.group.Group` for tensors on the CPU. For one thread of each process."""

    def __init__(self, descriptor: int, rank: int, size: int, join_timeout_s: float, timeout_s: float) -> None:
        """Maps the memory of `create_group_memory` and waits for the other ranks, at most `join_timeout_s`.

        `timeout_s`: of each later wait, until another is set. Does not keep `descriptor`. Raises GroupBroken.
        """
        self.rank, self.size = rank, size
        self.timeout_s = join_timeout_s
        """How long a wait may last."""
        self._memory = mmap.mmap(descriptor, 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pids = memoryview(self._memory)[_PIDS_AT : _PIDS_AT + 4 * size].cast("i")
        slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_HEADER_BYTES)
        self._halves = slots.view(size, 2, HALF_BYTES)
        self._turn = 0
        self._peers = [peer for peer in range(size) if peer != rank]
        self._ends: dict[int, int] = {}
        """A pidfd of each peer, readable once its process has ended."""
        self._pids[rank] = os.getpid()
        self._meet()
        try:
            self._ends = {peer: os.pidfd_open(self._pids[peer]) for peer in self._peers}
        except OSError as error:
            raise self._broken(f"a rank ended while it joined: {error.strerror}") from error
        self.timeout_s = timeout_s

    def abort(self) -> None:
        """Ends the waits of all ranks, and their next exchanges, with GroupBroken."""
        self._memory[0] = 1

    def close(self) -> None:
        """Sets the flag, as no exchange can follow, and gives up the descriptors; the memory goes with this object."""
        self.abort()
        while self._ends:
            os.close(self._ends.popitem()[1])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        flat = x.reshape(-1)
        out = torch.empty_like(flat)
        for span, parts in self._exchange(flat, [len(flat)] * self.size):
            out[span] = tree_sum(parts)
        return out.view(x.shape)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        whole = [torch.empty(len(x), width, dtype=x.dtype) for width in widths]
        for span, parts in self._exchange(x.reshape(-1), [each.numel() for each in whole]):
            for each, part in zip(whole, parts, strict=True):
                each.view(-1)[span] = part
        return torch.cat(whole, dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`; returns when all ranks are there."""
        flat = x.reshape(-1)
        out = torch.empty_like(flat)
        for span, parts in self._exchange(flat, [len(flat)] + [0] * (self.size - 1)):
            out[span] = parts[0]
        return out.view(x.shape)

    def _exchange(self, flat: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yields spans of all ranks' elements, `lengths` of them, with what each rank has there; `flat`: our own."""
        step, most = HALF_BYTES // flat.itemsize, max(lengths)
        for first in range(0, most, step):
            halves = self._halves[:, self._turn].view(flat.dtype)  # [size, step]
            counts = [max(0, min(step, length - first)) for length in lengths]
            own = counts[self.rank]
            halves[self.rank, :own] = flat[first : first + own]
            self._meet()
            self._turn = 1 - self._turn
            yield (
                slice(first, min(first + step, most)),
                [half[:count] for half, count in zip(halves, counts, strict=True)],
            )

    def _meet(self) -> None:
        """Returns when every peer is here too.

        Counts slices, not the clock's time: when all ranks were paused together, none of them stands still.
        """
        for peer in self._peers:
            _libc.sem_post(self._semaphore(self.rank, peer))
        waited_s = 0.0
        for peer in self._peers:
            semaphore = self._semaphore(peer, self.rank)
            while self._memory[0] or not _waited(semaphore):
                if self._memory[0]:
                    raise GroupBroken(f"rank {self.rank}: another rank gave up")
                if self._has_ended(peer) and _libc.sem_trywait(semaphore):
                    raise self._broken(f"rank {peer} has ended")
                waited_s += _SLICE_S
                if waited_s > self.timeout_s:
                    raise self._broken(f"rank {peer} did not answer within {self.timeout_s:g} s")

    def _semaphore(self, giver: int, taker: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + _SEMAPHORES_AT + (giver * self.size + taker) * _SEMAPHORE_BYTES)

    def _has_ended(self, peer: int) -> bool:
        return peer in self._ends and bool(select.select([self._ends[peer]], [], [], 0)[0])

    def _broken(self, message: str) -> GroupBroken:
        self.abort()
        return GroupBroken(f"rank {self.rank}: {message}")


def _waited(semaphore: ctypes.c_void_p) -> bool:
    """Takes the semaphore, within `_SLICE_S`; returns False if nobody has posted."""
    if not _libc.sem_trywait(semaphore):
        return True
    until = time.clock_gettime_ns(time.CLOCK_REALTIME) + int(_SLICE_S * 1e9)
    return not _libc.sem_timedwait(semaphore, ctypes.byref(_Timespec(*divmod(until, 1_000_000_000))))
