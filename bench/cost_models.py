"""The cost models and the trace that `tandem plan` takes by itself: `python -m bench.cost_models` writes both.

    bench/results/peers-SHAPE-TIER.json   steps of the engine on two cores      ─▶ simulator/machines/SHAPE-TIER.json
    bench/results/gpu-vllm.json           closed loops of callers on one GPU    ─▶ simulator/machines/8b-h200.json

Steps and hand-offs take what the records say, which each model names. Pool, seats and chunks are a worker's defaults,
and messages take what `CostModel` assumes. A closed loop gives two steps: its median gap is a step of decodes alone,
its mean gap the mean step, which has the loop's share of prompt tokens.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bench.simulate import BLOCK_SIZE, CHAT_ALONE
from bench.support.checkpoints import PEER_SHAPES
from bench.support.machine import RESULTS
from engine.chunking import ChunkTokens
from engine.memory import CPU_CAP_BYTES, FEW_SEQS, GIB, MANY_SEQS
from simulator.costs import CostModel, StepWork, fit
from simulator.shipped import SAMPLE_TRACE, shipped_model
from simulator.traces import independent

Sample = tuple[StepWork, float]
"""A step and its seconds."""
_OURS = "tandem"
_FULL_TOKENS = 128
"""Of the kernels of every tier but amx (`kernels.cpu`)."""
_H200_POOL_BYTES = 100 * GIB
"""Nine tenths of the memory, less weights and steps."""
_RATE_PER_S, _NUM_REQUESTS, _SEED = 1.0, 100, 0


def cost_models() -> Iterator[tuple[str, CostModel]]:
    """All that the records give, by name."""
    records = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    for stem in (each for each in records if each.startswith("peers-")):
        tier, settings = records[stem]["machine"]["tier"], records[stem]["results"]["settings"]
        yield (
            f"{settings['shape']}-{tier}",
            CostModel(
                threads=settings["threads"],
                **_steps(
                    engine_steps(records[stem]["results"]),
                    f"{settings['shape']}, a worker on {settings['threads']} cores with {tier}: {stem}.json",
                    records[stem]["date"],
                ),
                **_sizes(settings["shape"], "cpu", None if tier == "amx" else _FULL_TOKENS),
                **_handoffs(records["transfer"]["results"], "shm"),
            ),
        )
    loops = records["gpu-vllm"]
    transfer = next(each for each in records["gpu"]["results"]["parts"] if each["command"].endswith(" cuda_ipc"))
    yield (
        "8b-h200",
        CostModel(
            **_steps(loop_steps(loops), f"8b, a worker on one {loops['machine']['gpu']}: gpu-vllm.json", loops["date"]),
            **_sizes("8b", "cuda", None),
            **_handoffs(transfer["result"], "cuda_ipc"),
        ),
    )


def engine_steps(results: Mapping[str, Any]) -> Iterator[Sample]:
    """Steps of decodes at a context, then steps full of whole prompts, or of chunks of one, by a record of peers."""
    for each in results["decode"]:
        seqs, context = map(int, each["workload"].split(" × "))
        yield StepWork(seqs, seqs * context, 0, 0), each["step_ms"][_OURS]["median"] / 1e3
    for each in results["prefill"]:
        _, length = map(int, each["workload"].split(" × "))
        for budget, found in each["tokens_per_s"][_OURS]["by_budget"].items():
            tokens = int(budget)
            yield StepWork(0, 0, tokens, tokens * (length - 1) // 2), tokens / found["median"]


def loop_steps(record: Mapping[str, Any]) -> Iterator[Sample]:
    """Two steps of each closed loop of one worker: of decodes alone, and the mean one."""
    for key in record:
        for loop, found in record[key].items() if key.startswith("tandem one worker") else ():
            callers, prompt, output = map(int, re.findall(r"\d+", loop))
            context, step_s = callers * (prompt + output // 2), found["itl_mean"] / 1e3
            tokens = round(found["tok_s"] * prompt / output * step_s)
            yield StepWork(callers, context, 0, 0), found["itl_p50"] / 1e3
            yield StepWork(callers, context, tokens, tokens * (prompt - 1) // 2), step_s


def _steps(samples: Iterable[Sample], source: str, date: str) -> dict[str, Any]:
    steps = list(samples)
    fitted = fit(steps)
    error = math.sqrt(fitted.mean_square)
    return {"step": fitted.costs, "source": f"{source} of {date}, {len(steps)} steps, off by {error:.1%}"}


def _sizes(shape: str, device: str, full_tokens: int | None) -> dict[str, Any]:
    sizes, on_cpu = PEER_SHAPES[shape].sizes, device == "cpu"
    token_bytes = 2 * 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    chunks = ChunkTokens.of(0, torch.device(device), full_tokens)
    return {
        "block_size": BLOCK_SIZE,
        "pool_blocks": (CPU_CAP_BYTES if on_cpu else _H200_POOL_BYTES) // (BLOCK_SIZE * token_bytes),
        "max_seqs": FEW_SEQS if on_cpu else MANY_SEQS,
        "chunk_tokens": chunks.beside,
        "prefill_chunk_tokens": chunks.alone,
        "kv_bytes_per_token": token_bytes,
    }


def _handoffs(results: Mapping[str, Any], transport: str) -> dict[str, Any]:
    """Those of the middle size of blocks."""
    found = [each for each in results["results"] if each["transport"] == transport and each["block_bytes"] == 376832]
    return {
        "handoff_s": found[0]["empty_ms"] / 1e3,
        "handoff_bytes_per_s": 1e9 * found[0]["median_gb_per_s"],
    }


def sample_trace() -> str:
    """Chats that have nothing in common, as `read_jsonl` reads them."""
    asks = independent(*CHAT_ALONE, _RATE_PER_S, _NUM_REQUESTS, _SEED)
    return "".join(
        f'{{"timestamp": {round(1e3 * ask.at_s)}, "input_length": {ask.prompt_tokens}, '
        f'"output_length": {ask.output_tokens}, "hash_ids": []}}\n'
        for ask in asks
    )


def main() -> int:
    """Writes all files."""
    for name, model in cost_models():
        model.write(shipped_model(name))
    SAMPLE_TRACE.write_text(sample_trace())
    return 0


if __name__ == "__main__":
    sys.exit(main())
