"""Where a step's time goes, phase by phase: `python -m bench.step_profile`.

Takes steps of a peers' shape with random weights and keeps the native step on its clock (`kernels.cpu.decoder`). Of
each kind of phase: milliseconds at work on the thread that called, and waiting for the others to finish theirs; bytes
of weights or KV that it must read, and so GB/s, to be held against the machine's own reads. What is in no phase is
sampling, batch building and Python. Writes `bench/results/profile-<tier>.json`, if it is the 135m shape as it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.ceilings import measure_read_gb_s
from bench.record import write_record
from bench.roofline import phase_bytes
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.machine import cpu_tier
from bench.support.step_timer import StepTimer
from engine.loading import keep_freed_memory
from kernels.cpu.decoder import NativeStep, PhaseClock
from kernels.cpu.tiers import TIERS
from kernels.dispatch import AUTO, select_kernels
from kernels.quantized import QuantForm
from models.config import ModelConfig
from models.loading import load_model
from tandem.kv_layout import KvLayout, QuantDType

STEPS = (("decode", 1, 256, 1), ("decode", 16, 256, 1), ("decode", 64, 256, 1), ("decode", 8, 2048, 1))
PROMPTS = (("prefill", 8, 0, 256), ("prefill", 1, 0, 2048))
"""(phase, seqs, context, tokens computed of each)."""
_REPEATS = {"decode": 16, "prefill": 2}
_BLOCK_SIZE = 16
_READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Spent:
    """One kind of phase in one step; milliseconds, means."""

    work_ms: float
    wait_ms: float
    num_bytes: int
    """Of weights or KV as they are held; 0 where it reads neither."""


def spent_by_phase(clock: PhaseClock, steps: int, num_bytes: dict[str, int]) -> dict[str, Spent]:
    """Of each of `steps` steps since the clock's last `take`, longest first; phases that took no time are left out."""
    found = {
        kind: Spent(work_s / steps * 1e3, wait_s / steps * 1e3, num_bytes.get(kind, 0))
        for kind, (work_s, wait_s) in clock.take().items()
        if work_s
    }
    return dict(sorted(found.items(), key=lambda pair: -(pair[1].work_ms + pair[1].wait_ms)))


def profile(
    timer: StepTimer, clock: PhaseClock, config: ModelConfig, weight_bytes: dict[str, int], kv_layout: KvLayout
) -> list[dict[str, Any]]:
    """One document per step; `weight_bytes` by kind of phase, as the model holds them."""
    plain_row_bytes = kv_layout.head_dim * torch.bfloat16.itemsize
    profiles = []
    for phase, seqs, context, query in (*STEPS, *PROMPTS):
        repeats = _REPEATS[phase]
        step = timer.step(seqs, context, query)
        timer.run(step)  # warm
        clock.take()
        total_ms = sum(timer.run(step) for _ in range(repeats)) / repeats * 1e3
        lens = [(query, context + query)] * seqs
        num_bytes = phase_bytes(config, lens, torch.bfloat16) | weight_bytes
        num_bytes["attend"] = num_bytes["attend"] * kv_layout.row_bytes // plain_row_bytes
        spent = spent_by_phase(clock, repeats, num_bytes)
        rest_ms = total_ms - sum(each.work_ms + each.wait_ms for each in spent.values())
        profiles.append(
            {
                "step": f"{phase} {seqs} × {context or query}",
                "total_ms": total_ms,
                "rest_ms": rest_ms,
                "phases": {name: asdict(each) for name, each in spent.items()},
            }
        )
        print(_line(profiles[-1]))
    return profiles


def measure(
    folder: Path, form: QuantForm | None, tier: str | None, kv_dtype: QuantDType | None = None
) -> dict[str, Any]:
    """Of the model in `folder`. Exits if it has no native step."""
    device = torch.device("cpu")
    threads, read_gb_s = torch.get_num_threads(), measure_read_gb_s(device, _READ_BYTES)
    kernels = select_kernels(AUTO, device, torch.bfloat16, tier)
    model = load_model(folder, "bfloat16", device, kernels, form)
    step = model.decoder.compiled
    if not isinstance(step, NativeStep):
        sys.exit(f"the kernels {kernels.name} have no native step here")
    step.clock = PhaseClock()
    if kernels.take_thread is not None:
        kernels.take_thread()  # as the engine's thread does: torch's own threads would disturb every step
    num_tokens = max(seqs * (context + query + _BLOCK_SIZE) for _, seqs, context, query in (*STEPS, *PROMPTS))
    timer = StepTimer(model, _BLOCK_SIZE, num_tokens, kernels, kv_dtype)
    assert isinstance(model.config, ModelConfig)  # a native step is of a decoder of ours
    kv_layout = model.kv_layout(_BLOCK_SIZE, kv_dtype)
    profiles = profile(timer, step.clock, model.config, step.weight_bytes(), kv_layout)
    timer.close()
    return {
        "tier": tier or cpu_tier(),
        "threads": threads,
        "read_gb_s": read_gb_s,
        "profiles": profiles,
    }


def _line(document: dict[str, Any]) -> str:
    phases = (f"{name} {each['work_ms']:.2f} + {each['wait_ms']:.2f}" for name, each in document["phases"].items())
    return f"{document['step']} {document['total_ms']:.2f} ms: {', '.join(phases)}, rest {document['rest_ms']:.2f}"


def main() -> int:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--threads", type=int, help="compute threads; without it, as many as torch takes")
    parser.add_argument("--quantize", choices=list(QuantForm), help="the form of the weights; without it, bfloat16")
    parser.add_argument("--kv-dtype", choices=list(QuantDType), help="the form of KV; without it, bfloat16")
    parser.add_argument("--cpu-tier", choices=TIERS, help="instructions of the kernels; without it, the highest")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    form = None if arguments.quantize is None else QuantForm(arguments.quantize)
    kv_dtype = None if arguments.kv_dtype is None else QuantDType(arguments.kv_dtype)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[arguments.shape], Path(folder))
        results = measure(Path(folder), form, arguments.cpu_tier, kv_dtype)
    is_plain = arguments.shape == "135m" and form is None and kv_dtype is None and arguments.cpu_tier is None
    if is_plain and not arguments.no_record:
        write_record(f"profile-{results['tier']}", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
