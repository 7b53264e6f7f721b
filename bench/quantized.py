"""All products of a decoder's step by the form of its weights: `python -m bench.quantized`.

Prints the bytes of the packed weights and, per number of tokens, milliseconds and how many times faster than bfloat16
that is. Forms take turns, so that a machine's moods meet all of them. The head is quantised too, as a product; the
embedding is none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from bench.kernels.shapes import SHAPE_135M, LayerShape
from kernels.cpu.library import Library, usable_tiers
from kernels.cpu.linear import NativeLinear
from kernels.cpu.operations import CpuOperations
from kernels.quantized import QuantForm, QuantizedWeight, quantize

_PLAIN = "bfloat16"
_SPREAD = 0.02


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-tier", choices=usable_tiers(), default=usable_tiers()[-1])
    parser.add_argument("--forms", nargs="+", choices=[_PLAIN, *QuantForm], default=[_PLAIN, *QuantForm])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    operations = CpuOperations(Library(args.cpu_tier))
    with torch.inference_mode():
        steps = {form: _open_step(operations, SHAPE_135M, form) for form in args.forms}
        print(f"{SHAPE_135M.name}, {operations.name}, {torch.get_num_threads()} threads, best of {args.rounds} rounds")
        for form, maps in steps.items():
            print(f"{form}: {sum(each.num_bytes for each in maps) / 1e6:.1f} MB")
        for tokens in args.tokens:
            best_s = _fastest_s({form: _calls(maps, tokens) for form, maps in steps.items()}, args.rounds)
            first_s = next(iter(best_s.values()))
            row = (f"{form} {took_s * 1e3:.2f} ms ({first_s / took_s:.2f})" for form, took_s in best_s.items())
            print(f"{tokens} tokens:", ", ".join(row), flush=True)


def _open_step(operations: CpuOperations, shape: LayerShape, form: str) -> list[NativeLinear]:
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


def _calls(maps: Sequence[NativeLinear], tokens: int) -> Callable[[], None]:
    """One step's products, each on activations of its own size."""
    inputs = {each.num_inputs: torch.randn(tokens, each.num_inputs).to(torch.bfloat16) for each in maps}

    def step() -> None:
        for each in maps:
            each(inputs[each.num_inputs])

    return step


def _fastest_s(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest step of each form; they take turns."""
    best_s = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for form, step in steps.items():
            began_s = time.perf_counter()
            step()
            best_s[form] = min(best_s[form], time.perf_counter() - began_s)
    return best_s


if __name__ == "__main__":
    main()
