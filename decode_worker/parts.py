"""What a decode worker is made of: its parts, and its caps and times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.growth import FIRST_GUESS_TOKENS
from decode_worker.incoming_transfers import TransferPolicy
from decode_worker.reservations import MAX_OVERTAKES, MAX_QUEUED
from decode_worker.scheduler import StepLimits
from engine.guides import Guides
from engine.prefix_cache import PrefixCache
from kvtransfer.base import Receiver, Sender
from shell.clock import Clock
from shell.telemetry.events import ProcessEvents, WorkerEvents
from tandem.validation import Validator
from worker.ports import StepEngine


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker works with; owned and closed by whoever made them."""

    engine: StepEngine
    cache: PrefixCache
    receiver: Receiver
    validator: Validator
    clock: Clock
    events: WorkerEvents = field(default_factory=ProcessEvents)
    guides: Guides | None = None
    """None = constraints are refused."""
    sender: Sender | None = None
    """Hands over what runs here when the worker drains, and prompts; None = it ends here, or is replayed."""


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """Caps and times."""

    limits: StepLimits
    max_sequence_tokens: int
    max_queued: int = MAX_QUEUED
    max_overtakes: int = MAX_OVERTAKES
    transfers: TransferPolicy = field(default_factory=TransferPolicy)
    first_guess_tokens: int = FIRST_GUESS_TOKENS
    """How long completions are expected to become before any has ended here."""
    overlap_steps: bool = True
    """Whether a second step may be in flight."""
    max_planning_share: float = math.inf
    """Of a step, that planning the next one may take for both to overlap: on a CPU they take each other's cores."""
    inter_token_objective_s: float | None = 0.0
    """See `ChunkBudget`."""
    waiting_served_ratio: float = 3.0
    alone_tokens: int | None = None
    """Prompt tokens of a step in which nothing decodes, if they are to be fewer than of others."""
    elastic: bool = False
    """Whether it computes prompts for other workers too; that needs a sender."""

    def chunk_budget(self) -> ChunkBudget:
        """A new one."""
        return ChunkBudget(
            self.limits.chunk_tokens, self.inter_token_objective_s, self.waiting_served_ratio, self.alone_tokens
        )
