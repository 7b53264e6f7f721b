"""A decode step by the form of its weights, its products alone or (`--steps`) all of it: `python -m bench.quantized`.

Prints the bytes of the packed weights and, per number of tokens, milliseconds and how many times faster than the first
form that is. Forms take turns: what slows the machine down meets all of them. The output projection is quantised too;
the embedding, of which a step reads some rows, is not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.kernels.shapes import SHAPE_135M, LayerShape
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.step_timer import StepTimer, Timing
from engine.loading import keep_freed_memory
from kernels.cpu.linear import NativeLinear
from kernels.cpu.tiers import machine_tiers
from kernels.dispatch import select_kernels
from kernels.operations import Kernels, Operations
from kernels.quantized import QuantForm, QuantizedWeight, quantize
from models.loading import load_model

_CPU = torch.device("cpu")
_PLAIN = "bfloat16"
_SPREAD = 0.02
_CONTEXT, _BLOCK_SIZE = 256, 16


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-tier", choices=machine_tiers())
    parser.add_argument("--forms", nargs="+", choices=[_PLAIN, *QuantForm], default=[_PLAIN, *QuantForm])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="whole decode steps of so many seqs, not products alone")
    args = parser.parse_args()
    kernels = select_kernels("cpu", _CPU, torch.bfloat16, args.cpu_tier)
    print(f"135M, {kernels.operations.name}, {torch.get_num_threads()} threads, best of {args.rounds} rounds")
    with torch.inference_mode():
        if args.steps:
            _measure_steps(kernels, args)
        else:
            _measure_products(kernels.operations, args)


def _measure_products(operations: Operations, args: argparse.Namespace) -> None:
    steps = {form: _open_step(operations, SHAPE_135M, form) for form in args.forms}
    for form, maps in steps.items():
        print(f"{form}: {sum(each.num_bytes for each in maps) / 1e6:.1f} MB")
    for tokens in args.tokens:
        _print_fastest(f"{tokens} tokens", {form: _calls(maps, tokens) for form, maps in steps.items()}, args.rounds)


def _measure_steps(kernels: Kernels, args: argparse.Namespace) -> None:
    keep_freed_memory()
    if kernels.take_thread is not None:
        kernels.take_thread()  # as the engine's thread does: torch's own threads would disturb every step
    most = max(args.tokens)
    timers: dict[str, StepTimer] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES["135m"], Path(folder))
        for form in args.forms:
            chosen = None if form == _PLAIN else QuantForm(form)
            model = load_model(Path(folder), _PLAIN, _CPU, kernels, chosen)
            timers[form] = StepTimer(model, _BLOCK_SIZE, most * (_CONTEXT + _BLOCK_SIZE), kernels)
    for batch in args.tokens:
        steps: dict[str, Callable[[], Timing | float]] = {
            form: partial(timer.decode, batch, _CONTEXT, 3) for form, timer in timers.items()
        }
        _print_fastest(f"{batch} seqs", steps, args.rounds)


def _print_fastest(what: str, steps: dict[str, Callable[[], Timing | float]], rounds: int) -> None:
    """Milliseconds of the fastest step of each form, and how many times the first form's speed; they take turns."""
    best_s = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for form, step in steps.items():
            took = step()
            best_s[form] = min(best_s[form], took.best_s if isinstance(took, Timing) else took)
    first_s = next(iter(best_s.values()))
    row = (f"{form} {took_s * 1e3:.2f} ms ({first_s / took_s:.2f})" for form, took_s in best_s.items())
    print(f"{what}:", ", ".join(row), flush=True)


def _open_step(operations: Operations, shape: LayerShape, form: str) -> list[NativeLinear]:
    """The products of a step in their order."""

    def opened(name: str, inputs: int, outputs: int) -> NativeLinear:
        weight: torch.Tensor | QuantizedWeight = (torch.randn(outputs, inputs) * _SPREAD).to(torch.bfloat16)
        if form != _PLAIN:
            assert isinstance(weight, torch.Tensor)
            weight = quantize(weight, QuantForm(form))
        linear = (operations.gated_linear if name == "gate_up" else operations.linear)(weight, None)
        assert isinstance(linear, NativeLinear)
        return linear

    layers = [opened(name, *sizes) for _ in range(shape.num_layers) for name, sizes in shape.linears.items()]
    return [*layers, opened("lm_head", shape.hidden, shape.vocab_size)]


def _calls(maps: Sequence[NativeLinear], tokens: int) -> Callable[[], float]:
    """Seconds of one step's products, each on activations of its own size."""
    inputs = {each.num_inputs: torch.randn(tokens, each.num_inputs).to(torch.bfloat16) for each in maps}

    def step() -> float:
        began_s = time.perf_counter()
        for each in maps:
            each(inputs[each.num_inputs])
        return time.perf_counter() - began_s

    return step


if __name__ == "__main__":
    main()
