"""One prompt on this worker: what was asked, how far it is, what it holds.

    WAITING → RUNNING → SENDING → gone

    WAITING   no blocks; the hand-off opens meanwhile
    RUNNING   all blocks of the prompt are its own; finished ones are also lent to the hand-off
    SENDING   the first token is known; blocks are held by the hand-off alone

Knows nothing of order, steps or timers (see `scheduler`, `step_loop`, `worker`).
"""

from __future__ import annotations

from typing import Protocol

from engine.sequence import Sequence
from tandem.errors import TandemError
from tandem.telemetry.observers import SequenceObserver
from tandem.types import Handle, TokenDelta


class RouterPort(Protocol):
    """What a prefill worker tells a router; `worker.service.RouterSession` is one."""

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        """The first token."""
        ...

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        """Every block is verified and attached."""
        ...

    def failed(self, handle: Handle, error: TandemError) -> None:
        """The sequence ended without a first token or without its hand-off."""
        ...


class Prompt:
    """State of one prompt from its arrival until nothing of it is held."""

    def __init__(
        self,
        router: RouterPort,
        handle: Handle,
        sequence: Sequence,
        num_blocks: int,
        now_s: float,
        observer: SequenceObserver,
    ) -> None:
        self.router = router
        self.handle = handle
        self.sequence = sequence
        self.num_blocks = num_blocks
        self.received_s = now_s
        self.observer = observer
        """Told of each thing where it happens; of the end by the worker alone."""
        self.started_s: float | None = None
        """When its first chunk went to the engine."""

    @property
    def priority(self) -> int:
        """Larger goes first."""
        return self.sequence.spec.priority

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled here: the first one, or none yet."""
        return self.sequence.num_tokens - len(self.sequence.spec.token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens without KV."""
        return len(self.sequence.spec.token_ids) - self.sequence.num_computed_tokens
