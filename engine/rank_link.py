"""What rank 0 of a model sends to the others: the arrays of a step, as bytes in shared memory, and a header.

    rank 0     waits until the slot is free ─ writes the arrays ─ header ─▶ computes
    follower   ◀─ header ─ copies the arrays ─ "read" ─▶ computes the same step

Slots take turns. Socket and memory are anonymous: only processes that are given their descriptors reach them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from engine.history import Ints
from engine.step import BlockCopy
from engine.step_layout import StepLayout
from engine.upload import Array, pack_into, packed_bytes, unpack
from kernels.group import GroupBroken
from kernels.shared_group import SharedGroup
from tandem.errors import InternalError

NUM_SLOTS = 4
SLOT_BYTES = 64 << 20
"""Tables of 512 sequences of 500,000 tokens each, in blocks of 16; pages that no step has reached take no memory."""
LEAST_TIMEOUT_S, STEPS_PER_TIMEOUT = 5.0, 3
"""A rank is lost that stands still for longer than this, and than so many times the longest step so far."""

Header: TypeAlias = tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Number of a slot, and dtype and shape of each array in it."""


A = TypeVar("A", Array, torch.Tensor)


class RankStep(NamedTuple, Generic[A]):
    """What the ranks of a model compute of a step, as arrays where it is laid out. Sizes as in `Batch`."""

    token_ids: A
    positions: A
    slots: A
    rows: A
    """The tokens whose results are wanted: `[R]`, or `[U]` if known tokens are scored."""
    starts: A
    seq_lens: A
    tables: A
    fed: A
    scored: A
    """`[S]`: see `ScoreLayout.rows`; none if no tokens are scored."""
    sampled: A
    """`[R]`: see `ScoreLayout.sample_rows`."""
    copies: A
    """`[M, 2]` source and target of block copies."""
    runs: A
    """How many of the copies may be made in any order, from the first on, run after run."""

    @staticmethod
    def of(layout: StepLayout, runs: Sequence[Sequence[BlockCopy]]) -> RankStep[Array]:
        """`runs`: the step's copies, as `independent_runs` gives them."""
        (token_ids, positions, slots, rows, starts, seq_lens), scores = layout.inputs, layout.scores
        none: Ints = np.zeros(0, np.int64)
        return RankStep(
            *(token_ids, positions, slots, rows if scores is None else scores.hidden_rows, starts, seq_lens),
            *(np.ascontiguousarray(layout.part.tables), layout.fed),
            *((none, none) if scores is None else (scores.rows, scores.sample_rows)),
            np.array([(copy.source, copy.target) for run in runs for copy in run], np.int64).reshape(-1, 2),
            np.array([len(run) for run in runs], np.int64),
        )


class StepSlots:
    """Memory through which steps pass, mapped in this process."""

    def __init__(self, descriptor: int) -> None:
        """Maps what `create` made; does not keep `descriptor`."""
        self._slots = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(NUM_SLOTS, SLOT_BYTES)

    @staticmethod
    def create() -> int:
        """Returns the descriptor of new memory, which the caller closes."""
        descriptor = os.memfd_create("tandem-steps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, NUM_SLOTS * SLOT_BYTES)
        return descriptor

    def write(self, slot: int, step: RankStep[Array]) -> Header:
        """Raises InternalError if the step is too large."""
        if (num_bytes := packed_bytes(step)) > SLOT_BYTES:
            raise InternalError(f"a step of {num_bytes} bytes for ranks, of which a slot holds {SLOT_BYTES}")
        pack_into(self._slots[slot], step)
        return slot, tuple((each.dtype.str, each.shape) for each in step)

    def read(self, header: Header) -> RankStep[torch.Tensor]:
        """Returns copies, aligned, on the CPU."""
        slot, forms = header
        like = [np.empty(shape, dtype) for dtype, shape in forms]
        copied = torch.from_numpy(self._slots[slot, : packed_bytes(like)].copy())
        return RankStep(*unpack(copied, like))


class StepSender:
    """Rank 0's side: numbers steps, and knows which of them the followers have read."""

    def __init__(self, slots: StepSlots, followers: Sequence[Connection[Any, Any]], group: SharedGroup) -> None:
        """All are lent."""
        self._slots = slots
        self._followers = followers
        self._group = group
        self._num_sent = 0
        self._num_read = [0] * len(followers)

    def send(self, step: RankStep[Array]) -> None:
        """Sends the step that all ranks compute next. Raises GroupBroken."""
        deadline_s = time.monotonic() + self._group.timeout_s
        for number, follower in enumerate(self._followers):
            while self._num_read[number] <= self._num_sent - NUM_SLOTS:
                if not follower.poll(max(0.0, deadline_s - time.monotonic())):
                    raise GroupBroken(f"rank {number + 1} did not take a step within {self._group.timeout_s:g} s")
                follower.recv_bytes()
                self._num_read[number] += 1
        header = self._slots.write(self._num_sent % NUM_SLOTS, step)
        for follower in self._followers:
            follower.send(header)
        self._num_sent += 1


@contextmanager
def in_step(group: SharedGroup) -> Iterator[None]:
    """Whatever fails within it breaks the group, as the ranks are no longer at the same place. Raises GroupBroken.

    Waits of later steps may last as long as the longest step suggests.
    """
    began_s = time.monotonic()
    try:
        yield
    except GroupBroken:
        group.abort()
        raise
    except Exception as error:
        group.abort()
        raise GroupBroken(f"rank {group.rank} failed in a step: {type(error).__name__}") from error
    group.timeout_s = max(group.timeout_s, STEPS_PER_TIMEOUT * (time.monotonic() - began_s))
