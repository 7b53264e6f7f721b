"""A sequence as it came to this worker: who wants it, what it is, and its place in line.

Stays with the sequence through all its stages here, and never changes:

    reservations (queued) → landing (blocks promised to a prefill worker) → roster (blocks, steps)
            └──────────────── prompt computed here ─────────────────────────→ ┘

The stage is not stored: it is the room that holds the arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from decode_worker.scheduler import Rank
from tandem.clock import Deadline
from tandem.errors import TandemError
from tandem.telemetry.observers import SequenceObserver
from tandem.types import Handle, SequenceSpec, TokenDelta


class RouterPort(Protocol):
    """What a decode worker tells a router; `worker.service.RouterSession` is one.

    Nothing of it awaits or blocks.
    """

    def reserved(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        """There is room; ticket and endpoint are empty if the prompt is computed here."""
        ...

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        """The prompt was computed here; its first token."""
        ...

    def deltas(self, deltas: Iterable[tuple[Handle, TokenDelta]]) -> None:
        """Everything that one step made for this router."""
        ...

    def failed(self, handle: Handle, error: TandemError) -> None:
        """The sequence ended without all its tokens; the worker keeps nothing of it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """One Reserve. Compared by identity."""

    router: RouterPort
    handle: Handle
    spec: SequenceSpec
    local_prefill: bool
    number: int
    """Counts up with each arrival at this worker."""
    arrived_s: float
    deadline: Deadline
    observer: SequenceObserver
    """Told of each thing where it happens; of the end by the worker alone."""

    @property
    def rank(self) -> Rank:
        """Larger priority first, then first come."""
        return (-self.spec.priority, self.number)
