"""Every kernel of this machine against its peers and the machine's own ceilings: `python -m bench.kernels`.

Prints a table and writes `bench/results/kernels-<device>.json`. All that is compared is measured
in the same run: our kernel sets that run here, torch's attention, flash-attn where it is
installed, matrix products and copies. `--device cuda` on a machine without a GPU says so and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from bench.attention_batch import AttentionBatch, largest_difference
from bench.attention_peers import peer_calls
from bench.ceilings import measure_ceilings
from bench.kernel_shapes import CPU_ATTENTION, CUDA_ATTENTION, SHAPE_8B, SHAPE_135M, AttentionShape
from bench.measurement import HEADER, Measurement
from bench.operation_calls import OperationCalls, linear_calls, small_calls
from bench.record import write_record
from bench.timing import time_s
from kernels.dispatch import available_backends, select_kernels
from kernels.operations import Kernels

_MAX_DIFFERENCE = 0.05
"""Of one element of attention's result between two back-ends in bfloat16."""
_CPU_TOKENS = (1, 16, 64, 512)
_CUDA_TOKENS = (1, 32, 256, 4096)


def kernel_sets(device: torch.device, dtype: torch.dtype) -> dict[str, Kernels]:
    """Ours that run here. The reference gathers all KV: on a GPU it is only there to be right."""
    names = [status.name for status in available_backends(device, dtype) if status.usable]
    if device.type == "cuda":
        names = [name for name in names if name != "reference"]
    return {name: select_kernels(name, device, dtype) for name in names}


def measure_attention(
    shapes: Sequence[AttentionShape], sets: dict[str, Kernels], dtype: torch.dtype, device: torch.device
) -> Iterator[Measurement]:
    """Ours, then the peers, at each shape. Raises RuntimeError if ours differs from the first peer's result."""
    for shape in shapes:
        batch = AttentionBatch(shape, dtype, device)
        own = {name: batch.calls(kernels.attention) for name, kernels in sets.items()}
        found: dict[str, torch.Tensor] = {}
        for name, calls in [*own.items(), *peer_calls(batch)]:
            try:
                result = calls[0]()
                took_s = time_s(calls, device)
            except RuntimeError as error:
                if name in own:
                    raise
                print(f"  {name} cannot compute {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            assert isinstance(result, torch.Tensor)
            found[name] = result
            yield Measurement("decode" if shape.is_decode else "prefill", str(shape), name, took_s, shape.cost(dtype))
        _check_agreement(shape, found)


def measure_operations(
    sets: dict[str, Kernels], token_counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[Measurement]:
    """Linear maps and small operations of one layer, by each distinct implementation."""
    layer = SHAPE_8B if device.type == "cuda" else SHAPE_135M
    by_name = {kernels.operations.name: kernels.operations for kernels in sets.values()}
    for tokens in token_counts:
        for name, operations in by_name.items():
            for make in (linear_calls, small_calls):
                for each in make(operations, layer, tokens, dtype, device):
                    yield _measure_operation(each, f"{layer.name}, T {tokens}", name, device)


def _measure_operation(operation: OperationCalls, shape: str, by: str, device: torch.device) -> Measurement:
    return Measurement(operation.name, shape, by, time_s(operation.calls, device, 0.15), operation.cost)


def _check_agreement(shape: AttentionShape, found: dict[str, torch.Tensor]) -> None:
    first, *others = found
    for name in others:
        difference = largest_difference(found[first], found[name])
        if not difference <= _MAX_DIFFERENCE:
            raise RuntimeError(f"{first} and {name} differ by {difference:.3g} at {shape}")


def measure(device: torch.device) -> dict[str, Any]:
    """Everything for one device, printed as it comes; returns the record."""
    began_s, dtype = time.monotonic(), torch.bfloat16
    ceilings = measure_ceilings(device)
    print(*(f"{name}: {value}" for name, value in asdict(ceilings).items()), sep="\n")
    sets = kernel_sets(device, dtype)
    on_gpu = device.type == "cuda"
    print(HEADER)
    rows: list[Measurement] = []
    for each in (
        *measure_attention(CUDA_ATTENTION if on_gpu else CPU_ATTENTION, sets, dtype, device),
        *measure_operations(sets, _CUDA_TOKENS if on_gpu else _CPU_TOKENS, dtype, device),
    ):
        print(each.row(ceilings), flush=True)
        rows.append(each)
    results: dict[str, Any] = {
        "ceilings": asdict(ceilings),
        "dtype": str(dtype),
        "measurements": [row.document(ceilings) for row in rows],
        "took_s": time.monotonic() - began_s,
    }
    return results


def main() -> int:
    """Measures and records; exit code 0 also where there is nothing to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="compute threads of a CPU; without it, as many as torch takes")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("not measured: no GPU")
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    write_record(f"kernels-{args.device}", measure(torch.device(args.device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
