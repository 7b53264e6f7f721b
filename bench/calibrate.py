"""Fits the simulator's cost model to steps of an engine on this machine. Used by `bench.simulate`."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from bench.step_timer import StepTimer
from engine.loading import keep_freed_memory
from engine.step import Step
from kernels.dispatch import AUTO, select_kernels
from models.loading import LoadedModel, load_model
from simulator.costs import CostModel, Fit, Sharing, StepWork, fit
from tandem.cores import usable_cores

_SEQS = (1, 4, 16)
_CONTEXTS = (128, 1024)
_CHUNKS = (16, 64, 256, 512)
_BEFORE = (0, 1024)
_MIXED = ((1, 32), (4, 64), (8, 128), (8, 512))
"""(sequences that decode, prompt tokens beside them)"""
_CONTEXT_OF_MIXED = 300
_REPEATS = 3
_SHARED_SEQS, _SHARED_CHUNK = 4, 128
"""Of the steps that are timed with and without a neighbour, and that a neighbour computes."""
_SHARED_ROUNDS = 6
_SHARED_DECODES = 8
"""Decode steps that a neighbour computes for each chunk: about as long."""
_NEIGHBOUR_READY_S = 120.0
BLOCK_SIZE = 16


def calibrate(model: Path, threads: int, device: str = "cpu") -> tuple[CostModel, Fit]:
    """Times decode steps, chunks of prompts, and both together; then how much a second worker slows them.

    On a CPU with cores for two: as `tandem serve` places two workers, on cores of their own. Takes about 20 s for 135M
    on two cores.
    """
    cores = usable_cores()
    has_room = device == "cpu" and len(cores) >= 2 * threads
    with _bound(cores[:threads] if has_room else cores):
        loaded, timer = _timer(model, threads, device)
        try:
            samples = [(StepWork.of(step.seqs), timer.median_s(step, _REPEATS)) for step in _steps(timer)]
            theirs = cores[threads : 2 * threads]
            sharing = _sharing(timer, model, theirs) if has_room else Sharing()
        finally:
            timer.close()
    fitted = fit(samples)
    layout = loaded.kv_layout(BLOCK_SIZE)
    costs = CostModel(
        fitted.costs,
        sharing=sharing,
        workers_per_host=len(cores) // threads if has_room else 1,
        threads=threads,
        block_size=BLOCK_SIZE,
        kv_bytes_per_token=layout.block_bytes // BLOCK_SIZE,
        source=f"measured here, {threads} thread(s) on {device}; steps differ by {fitted.median_error:.0%} (median)",
    )
    return costs, fitted


def _timer(model: Path, threads: int, device: str) -> tuple[LoadedModel, StepTimer]:
    torch.set_num_threads(threads)
    keep_freed_memory()
    target = torch.device(device)
    kernels = select_kernels(AUTO, target, torch.bfloat16)
    loaded = load_model(model, "bfloat16", target, kernels)
    return loaded, StepTimer(loaded, BLOCK_SIZE, _SEQS[-1] * (_CONTEXTS[-1] + BLOCK_SIZE), kernels)


def _steps(timer: StepTimer) -> list[Step]:
    steps = [timer.step(seqs, context, 1) for seqs, context in product(_SEQS, _CONTEXTS)]
    steps += [timer.step(1, before, chunk) for chunk, before in product(_CHUNKS, _BEFORE)]
    for seqs, chunk in _MIXED:
        parts = timer.step(seqs, _CONTEXT_OF_MIXED, 1), timer.step(1, 0, chunk)
        steps.append(Step((*parts[0].seqs, *parts[1].seqs)))
    return steps


def _shared_steps(timer: StepTimer) -> tuple[Step, Step]:
    """Of decodes, and of a prompt."""
    return timer.step(_SHARED_SEQS, _CONTEXT_OF_MIXED, 1), timer.step(1, 0, _SHARED_CHUNK)


def _sharing(timer: StepTimer, model: Path, cores: Sequence[int]) -> Sharing:
    """Times both kinds of step alone and beside a process that computes on `cores`, by turns."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    neighbour = context.Process(target=_compute_beside, args=(model, tuple(cores), ready, go), daemon=True)
    neighbour.start()
    try:
        if not ready.wait(_NEIGHBOUR_READY_S):
            raise RuntimeError("the second process did not load the model")
        decode, prompt = _shared_steps(timer)
        ratios: dict[str, list[float]] = {"decode": [], "prompt": []}
        for _ in range(_SHARED_ROUNDS):
            alone = _mean_s(timer, decode), _mean_s(timer, prompt, 2)
            go.set()
            beside = _mean_s(timer, decode), _mean_s(timer, prompt, 2)
            go.clear()
            ratios["decode"].append(beside[0] / alone[0])
            ratios["prompt"].append(beside[1] / alone[1])
        print({name: [round(each, 2) for each in found] for name, found in ratios.items()}, file=sys.stderr)
        return Sharing(**{name: max(1.0, statistics.median(found)) for name, found in ratios.items()})
    finally:
        neighbour.terminate()
        neighbour.join()


def _mean_s(timer: StepTimer, step: Step, count: int = _SHARED_DECODES) -> float:
    timer.run(step)  # while the other process comes and goes
    return statistics.fmean(timer.run(step) for _ in range(count))


def _compute_beside(model: Path, cores: tuple[int, ...], ready: Event, go: Event) -> None:
    """A second worker's process: decodes and prompts by turns, while `go` is set."""
    with _bound(cores):
        _, timer = _timer(model, len(cores), "cpu")
        decode, prompt = _shared_steps(timer)
        ready.set()
        while go.wait():
            timer.run(prompt)
            for _ in range(_SHARED_DECODES):
                if go.is_set():
                    timer.run(decode)


@contextmanager
def _bound(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts, run on `cores` only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
