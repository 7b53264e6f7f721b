"""Steps that a worker on a GPU takes before its pool is made: every kernel compiles, and what steps need shows.

They go as far as served ones do: full chunks, alone and beside the largest decode batch, chunks behind a context, every
kind of draw, a scored prompt, a copy, a digest, and the largest steps that are captured, with their workspaces for the
longest sequence. A kernel is compiled once for each combination of its arguments' types
and alignments, and those depend on the model and on how many tokens a step has, by few kinds:
tests/kernels/test_triton_launches.py compares what serving launches with what is launched here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.draws import SampleSpec
from engine.graph_shapes import GraphLadder
from engine.graphs import StepGraphs
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.step import BlockCopy, DecodeRows, ScheduledSeq, ScoredTokens, Step
from kernels.digest import digest_blocks
from kernels.operations import Kernels
from models.loading import LoadedModel
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.kv_layout import KvLayout
from tandem.types import BlockId, SamplingParams, TokenId

_log = get_logger(__name__)

_GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
_DRAWN = SampleSpec(
    SamplingParams(
        max_tokens=1, temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, logprobs=1, logit_bias={TokenId(0): 1.0}
    ),
    output_index=0,
)

_BETWEEN = (16, 32, 64, 256)
"""Tokens of steps that are neither small nor large: products of quantised weights have tiles of their own for them, and
so has the projection to logits, of a prompt that is scored up to 64 at a time."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How large steps become."""

    chunk_tokens: int
    """Tokens of prompts in a step."""
    max_seqs: int
    context_tokens: int
    """Longest sequence."""


def warm_up_steps(sizes: StepSizes, block_size: int) -> tuple[int, tuple[Step, ...]]:
    """Returns how many blocks the steps use, and the steps, in order.

    Seqs of one step share blocks: with the same tokens at the same positions they write the same into them.
    """
    fresh = max(1, min(sizes.chunk_tokens, sizes.context_tokens // 2))
    chunk = max(1, min(max(2, sizes.chunk_tokens // sizes.max_seqs), sizes.context_tokens - fresh - 1))
    longest = max(1, min(sizes.chunk_tokens, sizes.context_tokens - 1))
    num_blocks = max(longest, fresh + chunk) // block_size + 2  # the last of them is copied to
    table = tuple(BlockId(block) for block in range(num_blocks - 1))

    def seqs(count: int, num_tokens: int, context: int, *samples: SampleSpec) -> tuple[ScheduledSeq, ...]:
        return (ScheduledSeq((TokenId(0),) * num_tokens, context, table, samples),) * count

    def prompts(num_tokens: int) -> tuple[ScheduledSeq, ...]:
        """Returns the fewest prompts of `num_tokens` tokens in all, or as many as a step may have."""
        count, rest = divmod(min(num_tokens, sizes.chunk_tokens), longest)
        return (*seqs(count, longest, 0), *(seqs(1, rest, 0) if rest else ()))[: sizes.max_seqs]

    def decodes(count: int, spec: SampleSpec = _GREEDY) -> DecodeRows:
        return DecodeRows.of(seqs(max(1, min(count, sizes.max_seqs)), 1, fresh + chunk, spec))

    def scored(num_tokens: int) -> tuple[ScheduledSeq, ...]:
        """Scores the first of these prompts from its second token on."""
        first, *others = prompts(num_tokens)
        known = first.token_ids[1:]
        return (first._replace(scored=ScoredTokens(known, 0, 0) if known else None), *others)

    num_chunks = min(sizes.max_seqs, max(1, sizes.chunk_tokens // chunk))
    largest = prompts(sizes.chunk_tokens)
    copy = BlockCopy(BlockId(0), BlockId(num_blocks - 1))
    return num_blocks, (
        Step(largest),
        Step(largest, rows=decodes(sizes.max_seqs - len(largest))),
        Step(seqs(num_chunks, chunk, fresh, _GREEDY)),
        *(step for count in _BETWEEN for step in (Step(scored(count)), Step((), rows=decodes(count)))),
        Step(scored(_BETWEEN[0]), rows=decodes(_BETWEEN[0])),
        Step((), rows=decodes(sizes.max_seqs)),
        Step((), copies=(copy,), rows=decodes(sizes.max_seqs, _DRAWN)),
        Step((), rows=decodes(1, _DRAWN)),
    )


def warm_up(
    model: LoadedModel, kernels: Kernels, layout: KvLayout, sizes: StepSizes, ladder: GraphLadder | None = None
) -> int:
    """On the engine thread, over a pool that is given back. Returns what steps take of the device beside it, in bytes.

    `ladder`: the steps that will be captured. Raises ConfigError if such steps do not fit into the device.
    """
    began_s, device = time.monotonic(), model.device
    num_blocks, steps = warm_up_steps(sizes, layout.block_size)
    kv_cache = KvCache.create(layout, num_blocks, device)
    try:
        step_bytes = _taken(device, lambda: _run(steps, Runner(model.decoder, kv_cache, kernels), kv_cache))
        if ladder is not None:  # captured steps keep their memory, so that it comes on top
            vocab_size = model.config.vocab_size
            step_bytes += _taken(
                device, lambda: StepGraphs(model.decoder, kv_cache.tensor, vocab_size, ladder).rehearse()
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError("--chunk-tokens", f"{sizes.chunk_tokens}: a step does not fit into {device}") from error
    finally:
        kv_cache.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of it is the pool's
    _log.info("kernels warm", seconds=round(time.monotonic() - began_s, 2), step_bytes=step_bytes)
    return step_bytes


def _run(steps: tuple[Step, ...], runner: Runner, kv_cache: KvCache) -> None:
    for step in steps:
        runner.run(step)
    digest_blocks(kv_cache.blocks_view, torch.zeros(1, dtype=torch.int64, device=kv_cache.tensor.device))


def _taken(device: torch.device, work: Callable[[], None]) -> int:
    """Returns the most bytes that `work` holds at a time beside what was there before."""
    before_bytes = _allocated_bytes(device)
    work()
    return _allocated_bytes(device, peak=True) - before_bytes


def _allocated_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Bytes of torch's allocator: now, where the peak starts again, or the peak since; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
