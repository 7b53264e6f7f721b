"""How much of a decode step a GPU spends waiting for launches, with and without CUDA graphs.

A small model on purpose: the shorter its kernels, the more launches cost. Wall time comes from steps
queued one after the other, the device's busy time from torch's profiler over the same steps.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.support.step_timer import two_in_flight
from bench.support.timing import Call
from engine.batch import Batch, build_batch
from engine.draws import SampleSpec
from engine.graph_shapes import GraphLadder
from engine.graphs import CudaCapturer, StepGraphs
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.step import ScheduledSeq, Step
from kernels.compiled_step import StepInputs
from kernels.dispatch import AUTO, select_kernels
from kernels.operations import Kernels
from models.loading import LoadedModel, load_model
from tandem.types import BlockId, SamplingParams, TokenId

_MODEL, _BATCH, _CONTEXT, _BLOCK_SIZE = "135m", 32, 1024, 16
_STEPS = 100


@dataclass(frozen=True, slots=True)
class LaunchGap:
    """One way to run the same decode step; seconds per step."""

    how: str
    wall_s: float
    busy_s: float
    """Sum of the device's kernels and copies; 0 if the profiler saw none."""

    @property
    def idle_share(self) -> float:
        """Share of the wall time; at most 0.03 is aimed at in a captured step."""
        return max(0.0, 1 - self.busy_s / self.wall_s)

    def __str__(self) -> str:
        return (
            f"{_MODEL} decode {_BATCH} × {_CONTEXT}, {self.how}: {self.wall_s * 1e3:.3f} ms per step, "
            f"device busy {self.busy_s * 1e3:.3f} ms, idle {self.idle_share:.1%}"
        )


def measure_gaps(device: torch.device) -> list[LaunchGap]:
    """The model's forward pass launched and captured, and the engine's whole step with graphs."""
    from bench.support.checkpoints import PEER_SHAPES, write_checkpoint  # needs transformers

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_checkpoint(PEER_SHAPES[_MODEL], Path(folder))
        kernels = select_kernels(AUTO, device, torch.bfloat16)
        model = load_model(Path(folder), "bfloat16", device, kernels)
        num_blocks = _BATCH * (-(-(_CONTEXT + 1) // _BLOCK_SIZE))
        kv_cache = KvCache.create(model.kv_layout(_BLOCK_SIZE), num_blocks, device)
        kv_cache.tensor.normal_()
        try:
            return _measure_all(model, kv_cache, kernels)
        finally:
            kv_cache.close()


def measure_gap(how: str, step: Call, steps: int = _STEPS) -> LaunchGap:
    """Runs `step` often enough to know what it takes once the queue is full."""
    _run(step, steps)
    began_s = time.perf_counter()
    _run(step, steps)
    wall_s = time.perf_counter() - began_s
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _run(step, steps)
    on_device = [event for event in profiler.events() or () if event.device_type == torch.profiler.DeviceType.CUDA]
    busy_s = sum(event.time_range.elapsed_us() for event in on_device) / 1e6
    return LaunchGap(how, wall_s / steps, busy_s / steps)


def _measure_all(model: LoadedModel, kv_cache: KvCache, kernels: Kernels) -> list[LaunchGap]:
    gc.collect()
    gc.freeze()  # as a worker does: a collection would walk all that other benches have left
    seqs = _scheduled(model.config.vocab_size)
    step = Step(tuple(seqs))
    ladder = GraphLadder((_BATCH,), (), 0, (_CONTEXT + _BLOCK_SIZE,))
    graphs = StepGraphs(model.decoder, kv_cache.tensor, model.config.vocab_size, ladder)
    graphs.capture(CudaCapturer(model.device))
    batch = build_batch(seqs, _BLOCK_SIZE, model.device, shape_of=graphs.shape_of)
    runner = Runner(model.decoder, kv_cache, kernels, graphs)
    return [
        measure_gap("launched one by one", lambda: _forward(model, kv_cache, batch)),
        measure_gap("captured", lambda: graphs.run(batch)),
        measure_gap("captured, whole engine step", lambda: runner.run(step)),
        measure_gap("captured, engine with two steps in flight", two_in_flight(runner, step)),
    ]


def _forward(model: LoadedModel, kv_cache: KvCache, batch: Batch) -> torch.Tensor:
    return model.decoder.forward(
        StepInputs(batch.token_ids, batch.positions, kv_cache.tensor, batch.metadata, batch.sample_rows)
    )


def _scheduled(vocab_size: int) -> list[ScheduledSeq]:
    each = -(-(_CONTEXT + 1) // _BLOCK_SIZE)
    order = random.Random(0).sample(range(_BATCH * each), _BATCH * each)
    sample = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
    return [
        ScheduledSeq(
            token_ids=(TokenId(seq % vocab_size),),
            context_len=_CONTEXT,
            block_table=tuple(BlockId(block) for block in order[seq * each : (seq + 1) * each]),
            samples=(sample,),
        )
        for seq in range(_BATCH)
    ]


def _run(step: Call, steps: int) -> None:
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
