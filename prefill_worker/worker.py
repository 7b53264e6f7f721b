"""A prefill worker is the core on a line of prompts and nothing else."""

from __future__ import annotations

from kvtransfer.base import Sender
from prefill_worker.prompts import PromptPolicy, Prompts
from worker.budget import ChunkBudget
from worker.core import Worker
from worker.parts import WorkerParts
from worker.source import Sources


def new_prefill_worker(parts: WorkerParts, sender: Sender, policy: PromptPolicy) -> Worker:
    """Builds a prefill worker; a single step is in flight at a time."""
    budget = ChunkBudget(policy.chunk_tokens)
    return Worker(
        parts, budget, lambda owner, releases: Sources(prompts=Prompts(parts, sender, policy, releases, owner))
    )
