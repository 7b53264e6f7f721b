"""Steps of every kind before the first request, so that none of them waits for a kernel to be compiled.

Triton compiles a kernel when it is first launched, seconds at a time. The steps write into blocks
that nobody holds yet.
"""

from __future__ import annotations

import time

from engine.runner import Runner
from engine.step import SampleSpec, ScheduledSeq, Step
from tandem.telemetry.logging import get_logger
from tandem.types import BlockId, SamplingParams, TokenId

_log = get_logger(__name__)

_GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
_DRAWN = SampleSpec(SamplingParams(max_tokens=1, temperature=1.0, top_k=2), output_index=0)
_STEPS = ((33, ()), (17, (_GREEDY,)), (1, (_GREEDY,)), (1, (_DRAWN,)))
"""Tokens and draws of each: a fresh prompt, a chunk behind it, decode steps."""


def warm_up(runner: Runner, num_blocks: int, block_size: int) -> None:
    """Runs as many of the steps as the pool holds; on the engine thread."""
    began_s, context = time.monotonic(), 0
    for num_tokens, samples in _STEPS:
        if context + num_tokens > num_blocks * block_size:
            break
        context += num_tokens
        blocks = tuple(BlockId(block) for block in range(-(-context // block_size)))
        runner.run(Step((ScheduledSeq((TokenId(0),) * num_tokens, context - num_tokens, blocks, samples),)))
    _log.info("kernels warm", seconds=round(time.monotonic() - began_s, 2))
