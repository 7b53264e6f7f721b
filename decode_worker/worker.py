"""A decode worker is the core on a running batch; an elastic one also computes prompts for others, beside it."""

from __future__ import annotations

from decode_worker.decodes import Decodes
from decode_worker.policy import WorkerPolicy
from kvtransfer.base import Receiver, Sender
from prefill_worker.prompt_line import LineLimits
from prefill_worker.prompts import PromptPolicy, Prompts
from worker.core import Worker
from worker.parts import WorkerParts
from worker.releases import BlockReleases
from worker.source import Owner, Sources


def new_decode_worker(
    parts: WorkerParts, receiver: Receiver, policy: WorkerPolicy, sender: Sender | None = None
) -> Worker:
    """`sender` hands over what runs here, if it drains or is overloaded, and prompts; None = requests end here, or are
    replayed. An elastic worker needs one.
    """
    budget = policy.chunk_budget()
    prompt_policy = PromptPolicy(LineLimits(policy.limits.max_seqs, beside_decodes=True), policy.max_sequence_tokens)

    def sources(owner: Owner, releases: BlockReleases) -> Sources:
        prompts = Prompts(parts, sender, prompt_policy, releases, owner)
        decodes = Decodes(parts, receiver, sender, policy, budget, releases, prompts, owner)
        return Sources(prompts if policy.elastic else None, decodes)

    return Worker(parts, budget, sources, overlap_steps=policy.overlap_steps)
