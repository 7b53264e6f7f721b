"""A decode worker is the core on a running batch; an elastic one also computes prompts for others, beside it."""

from __future__ import annotations

from decode_worker.decodes import Decodes
from kvtransfer.base import Receiver, Sender
from prefill_worker.prompts import Prompts
from shell.config import DecodeConfig
from tandem.decision import Decision, decision
from worker.admission import Forecast
from worker.budget import ChunkBudget
from worker.core import Worker
from worker.ports import WorkerParts
from worker.releases import BlockReleases
from worker.source import Owner, Sources
from worker.tuning import FIRST_GUESS_TOKENS, OBJECTIVE_STEPS


def new_decode_worker(
    parts: WorkerParts,
    receiver: Receiver,
    config: DecodeConfig,
    sender: Sender | None = None,
    *,
    first_guess_tokens: int = FIRST_GUESS_TOKENS,
) -> Worker:
    """`sender` hands over what runs here, if it drains or is overloaded, and prompts; None = requests end here, or are
    replayed. An elastic worker needs one.
    """
    objective_s, _ = objective(config)
    tokens = parts.sizes.chunk_tokens
    budget = ChunkBudget(tokens.beside, objective_s, config.waiting_served_ratio, tokens.alone, parts.sizes.rungs)
    forecast = Forecast(parts.cache.pool, first_guess_tokens)

    def sources(owner: Owner, releases: BlockReleases) -> Sources:
        prompts = Prompts(parts, sender, releases, owner, beside_decodes=True)
        decodes = Decodes(parts, receiver, sender, forecast, budget, releases, prompts, owner, elastic=config.elastic)
        return Sources(prompts if config.elastic else None, decodes)

    return Worker(parts, budget, sources, overlap_steps=config.overlap_steps == "auto")


def objective(config: DecodeConfig) -> tuple[float | None, Decision]:
    """Returns the inter-token objective of a `ChunkBudget`, and why it is that."""
    asked_s = objective_s = config.inter_token_objective_s
    if asked_s is not None:
        value, why = f"{asked_s:g} s" if asked_s else "none", ""
    elif config.elastic:
        value, why = f"{OBJECTIVE_STEPS:g} times the shortest decode step", "streams go on beside prompts for others"
    else:  # by itself it computes most in whole chunks: 225 tokens/s against 134 (bench/LOG.md)
        objective_s, value, why = 0.0, "none", "a decode worker alone computes most in whole chunks"
    return objective_s, decision("inter-token objective", value, "--inter-token-objective", asked_s is not None, why)
