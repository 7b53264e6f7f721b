"""The engine alone, in this process: no router, no hand-off, no gRPC. The floor that serving is held against."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.chunking import plan_chunks
from engine.loading import Engine
from engine.sequence import Sequence
from engine.step import BrokenLogits, Step
from tandem.types import RequestId, SamplingParams, TokenId


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What one batch took."""

    first_token_s: float
    """From the call to the first token of the last prompt, all prompts in ragged steps of `chunk_tokens` at most."""
    step_s: tuple[float, ...]
    """Each decode step of the whole batch."""
    token_ids: tuple[tuple[TokenId, ...], ...]
    """The completions."""


def run_batch(engine: Engine, prompts: SequenceOf[SequenceOf[int]], max_tokens: int, chunk_tokens: int) -> EngineTimes:
    """Greedy, end-of-text ignored: computes every prompt, then decodes all of them together."""
    return asyncio.run(_run(engine, prompts, max_tokens, chunk_tokens))


async def _run(engine: Engine, prompts: SequenceOf[SequenceOf[int]], max_tokens: int, chunk_tokens: int) -> EngineTimes:
    seqs = [_sequence(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
    began_s = time.perf_counter()
    while waiting := [seq for seq in seqs if not seq.num_output_tokens]:
        chunks = plan_chunks([seq.num_remaining_tokens for seq in waiting], chunk_tokens, len(waiting))
        await _step(engine, [(seq, chunk) for seq, chunk in zip(waiting, chunks, strict=True) if chunk])
    first_token_s = time.perf_counter() - began_s
    step_s = []
    while not seqs[0].is_finished:
        began_s = time.perf_counter()
        await _step(engine, [(seq, 1) for seq in seqs])
        step_s.append(time.perf_counter() - began_s)
    for seq in seqs:
        engine.pool.release(seq.take_blocks())
    return EngineTimes(first_token_s, tuple(step_s), tuple(seq.output_token_ids for seq in seqs))


def _sequence(number: int, prompt: SequenceOf[int], max_tokens: int) -> Sequence:
    token_ids = tuple(TokenId(token_id) for token_id in prompt)
    return Sequence(number, SamplingParams(max_tokens=max_tokens, temperature=0.0), token_ids)


async def _step(engine: Engine, chunks: SequenceOf[tuple[Sequence, int]]) -> None:
    """One engine step that computes so many tokens of each seq."""
    for seq, num_tokens in chunks:
        wanted = seq.blocks_wanted(num_tokens, engine.pool.block_size)
        if wanted:
            seq.add_blocks(engine.pool.allocate(wanted))
    result = await engine.thread.launch(Step(tuple(seq.schedule(size) for seq, size in chunks)))
    for (seq, _), outputs in zip(chunks, result.outputs, strict=True):
        for sampled in outputs:
            if isinstance(sampled, BrokenLogits):
                raise sampled.error(RequestId(f"bench-{seq.index}"))
            seq.append_token(sampled[0].token_id)
