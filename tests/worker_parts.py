"""What a worker's core works with, around any engine and cache."""

from __future__ import annotations

from typing import Any

from engine.chunking import ChunkTokens, EngineSizes
from engine.prefix_cache import PrefixCache
from shell.clock import Clock, MonotonicClock
from tandem.limits import Limits
from tandem.validation import Validator
from tests.token_engine import VOCAB_SIZE
from worker.ports import StepEngine, WorkerParts

CONTEXT_TOKENS = 4096


def parts_of(
    engine: StepEngine,
    cache: PrefixCache,
    clock: Clock | None = None,
    *,
    max_seqs: int,
    chunk_tokens: int,
    max_tokens: int = CONTEXT_TOKENS,
    vocab_size: int = VOCAB_SIZE,
    **others: Any,
) -> WorkerParts:
    """`max_tokens`: of a sequence. `others`: events and guides."""
    sizes = EngineSizes(ChunkTokens(chunk_tokens, chunk_tokens), max_seqs, max_tokens)
    validator = Validator(Limits(), vocab_size, CONTEXT_TOKENS)
    return WorkerParts(engine, cache, sizes, validator, clock or MonotonicClock(), **others)
