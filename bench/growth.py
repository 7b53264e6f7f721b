"""How a step's time grows with batch, context and block size: `python -m bench.growth`.

Times single steps of the 135M shape (or `--model DIR`), writes `bench/results/growth.json` and draws
`docs/images/growth.svg`, which the performance page shows. Needs matplotlib for the drawing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.page import ROOT, read_records
from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.step_timer import StepTimer
from engine.loading import keep_freed_memory
from kernels.dispatch import AUTO, select_kernels
from kernels.operations import Kernels
from models.loading import LoadedModel, load_model

IMAGE = ROOT / "docs" / "images" / "growth.svg"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SHORT, _LONG, _SEQS, _CHUNK = 256, 2048, 8, 512

Series = list[tuple[int, float]]
"""(size, milliseconds or tokens per second)."""


def measure(model: LoadedModel, kernels: Kernels) -> dict[str, Any]:
    """Every series; steps in milliseconds (median), prompts in tokens per second."""
    timer = StepTimer(model, 16, BATCHES[-1] * (_SHORT + 16), kernels)
    by_batch = _series("batch", BATCHES, lambda batch: timer.decode(batch, _SHORT).median_s * 1e3)
    by_context = {
        str(seqs): _series(
            f"context, {seqs} seqs",
            [context for context in CONTEXTS if seqs * context <= CONTEXTS[-1]],
            lambda context, seqs=seqs: timer.decode(seqs, context, 5).median_s * 1e3,
        )
        for seqs in (1, _SEQS)
    }
    prompts = _series("prompt", PROMPTS, lambda length: _prompt_rate(timer, length))
    timer.close()
    return {
        "kernels": kernels.operations.name,
        "threads": torch.get_num_threads(),
        "by_batch": by_batch,
        "by_context": by_context,
        "by_block_size": _series("block size", BLOCK_SIZES, lambda size: _at_block_size(model, size, kernels)),
        "prompt_tokens_per_s": prompts,
        "short_tokens": _SHORT,
        "long_tokens": _LONG,
        "seqs": _SEQS,
        "chunk_tokens": _CHUNK,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Four panels: batch, context, block size, prompt length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2).flat
    axes[0].plot(*zip(*results["by_batch"], strict=True), marker="o")
    axes[0].set(title=f"decode step, contexts of {results['short_tokens']}", xlabel="sequences", ylabel="ms")
    for seqs, series in results["by_context"].items():
        axes[1].plot(*zip(*series, strict=True), marker="o", label=f"{seqs} sequence(s)")
    axes[1].set(title="decode step", xlabel="context, tokens", ylabel="ms")
    axes[1].legend()
    axes[2].plot(*zip(*results["by_block_size"], strict=True), marker="o")
    axes[2].set(
        title=f"decode step, {results['seqs']} × {results['long_tokens']}", xlabel="block size, tokens", ylabel="ms"
    )
    axes[3].plot(*zip(*results["prompt_tokens_per_s"], strict=True), marker="o")
    axes[3].set(
        title=f"one prompt in chunks of {results['chunk_tokens']}", xlabel="prompt, tokens", ylabel="tokens per second"
    )
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _prompt_rate(timer: StepTimer, length: int) -> float:
    starts = range(0, length, _CHUNK)
    seconds = sum(timer.prefill(1, start, min(_CHUNK, length - start), 1).best_s for start in starts)
    return length / seconds


def _at_block_size(model: LoadedModel, block_size: int, kernels: Kernels) -> float:
    timer = StepTimer(model, block_size, _SEQS * (_LONG + block_size), kernels)
    try:
        return timer.decode(_SEQS, _LONG).median_s * 1e3
    finally:
        timer.close()


def _series(name: str, sizes: Any, measured: Any) -> Series:
    found: Series = []
    for size in sizes:
        found.append((size, measured(size)))
        print(f"{name} {size}: {found[-1][1]:.2f}", flush=True)
    return found


def main() -> int:
    """Measures, records and draws; `--draw` only draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; without it, random weights in the 135M shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="compute threads; without it, as many as torch takes")
    parser.add_argument("--draw", action="store_true", help="only draw from the last record")
    arguments = parser.parse_args()
    if not arguments.draw:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        keep_freed_memory()
        with tempfile.TemporaryDirectory() as folder:
            path = arguments.model or Path(folder)
            if arguments.model is None:
                write_checkpoint(PEER_SHAPES["135m"], path)
            device = torch.device(arguments.device)
            kernels = select_kernels(AUTO, device, torch.bfloat16)
            results = measure(load_model(path, "bfloat16", device, kernels), kernels)
        write_record("growth", results)
    draw(read_records()["growth"]["results"], IMAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
