"""Caps and times of a worker that decodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.incoming_transfers import TransferPolicy
from decode_worker.scheduler import StepLimits
from worker.admission import FIRST_GUESS_TOKENS
from worker.budget import ChunkBudget

MAX_QUEUED = 1024
"""Reservations that may wait on a worker; routers queue before that."""


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """Caps and times."""

    limits: StepLimits
    max_sequence_tokens: int
    max_queued: int = MAX_QUEUED
    transfers: TransferPolicy = field(default_factory=TransferPolicy)
    first_guess_tokens: int = FIRST_GUESS_TOKENS
    """Expected length of completions before any has ended here."""
    overlap_steps: bool = True
    """Whether a second step may be in flight."""
    inter_token_objective_s: float | None = 0.0
    """See `ChunkBudget`."""
    waiting_served_ratio: float = 3.0
    alone_tokens: int | None = None
    """Prompt tokens of a step in which nothing decodes; None = as many as in other steps."""
    elastic: bool = False
    """Whether the worker computes prompts for other workers too; that needs a sender."""

    def chunk_budget(self) -> ChunkBudget:
        """Returns a new chunk budget."""
        return ChunkBudget(
            self.limits.chunk_tokens, self.inter_token_objective_s, self.waiting_served_ratio, self.alone_tokens
        )
