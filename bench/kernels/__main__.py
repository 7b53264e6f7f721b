"""Every kernel of this machine against its peers and the machine's own ceilings: `python -m bench.kernels`.

Prints tables and writes `bench/results/kernels-<device>.json`. All that is compared is measured in
the same run: our kernel sets that run here, torch's attention, flash-attn where it is installed,
matrix products and copies; on a CPU also oneDNN's products and those of every other tier of ours.
`--device cuda` on a machine without a GPU says so and writes nothing. `--head-dim D` measures attention of heads of
that size alone and writes nothing: for a flash-attn that was built for some sizes only.
What fails is named in the record and fails the command; the rest is measured all the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch

from bench.kernels.attention_batch import AttentionBatch, largest_difference
from bench.kernels.attention_peers import peer_calls
from bench.kernels.ceilings import measure_ceilings
from bench.kernels.launch_gaps import measure_gaps
from bench.kernels.operation_calls import OperationCalls, linear_calls, quantized_linear_calls, small_calls
from bench.kernels.product_peers import MakesLinear, OneDnn, has_one_dnn, other_tiers
from bench.kernels.roofline import HEADER, Cost, Measurement
from bench.kernels.shapes import CPU_ATTENTION, CUDA_ATTENTION, SHAPE_8B, SHAPE_135M, AttentionShape, LayerShape
from bench.support.machine import describe_gpu, write_record
from bench.support.timing import Call, time_s
from kernels.dispatch import available_backends, select_kernels
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from kernels.quantized_kv import LARGEST

_MAX_DIFFERENCE = 0.05
"""Of one element of attention's result between two back-ends in bfloat16."""
_CPU_TOKENS = (1, 4, 16, 64, 256, 512, 2048)
_OTHER_TIERS_TOKENS = 64
"""Up to so many tokens the tiers that are not in use are measured too, and quantised products."""
_CUDA_TOKENS = (1, 32, 256, 4096)
_LAYOUTS = 6
_GPU_QUANTIZED_KV = (32, 16)
"""Quantised KV is measured on a GPU for so many seqs and blocks of so many tokens alone."""
_BUDGET_S = 0.15
_DTYPE = torch.bfloat16

_Result = TypeVar("_Result")


class Run:
    """One run on one device: what was measured, and what failed."""

    def __init__(self, device: torch.device, cpu_tier: str | None = None, head_dim: int | None = None) -> None:
        """With `head_dim`, attention of that size is all that is measured."""
        self.device, self.cpu_tier, self.head_dim = device, cpu_tier, head_dim
        self.rows: list[Measurement] = []
        self.failures: list[str] = []
        self.sets = kernel_sets(device, cpu_tier)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def measure(self) -> dict[str, Any]:
        """Everything, printed as it comes; returns the record."""
        began_s = time.monotonic()
        self.ceilings = measure_ceilings(self.device)
        print(*(f"{name}: {value}" for name, value in asdict(self.ceilings).items()), sep="\n")
        machine = describe_gpu(self.device) if self.on_gpu else {}
        print(*(f"{name}: {value}" for name, value in machine.items()), HEADER, sep="\n", flush=True)
        for shape in self._shapes():
            self._try(f"attention at {shape}", partial(self._measure_attention, shape))
        for tokens in self._tokens():
            self._try(f"operations at {tokens}", partial(self._measure_operations, tokens))
            if not self.on_gpu:
                self._try(f"products at {tokens}", partial(self._measure_product_peers, tokens))
            if self._has_quantized_products(tokens):
                self._try(f"quantised products at {tokens}", partial(self._measure_quantized_products, tokens))
        results: dict[str, Any] = {
            **machine,
            "ceilings": asdict(self.ceilings),
            "dtype": str(_DTYPE),
            "measurements": [row.document(self.ceilings) for row in self.rows],
        }
        if self.on_gpu and self.head_dim is None:
            gaps = self._try("launch gaps", lambda: measure_gaps(self.device)) or ()
            print(*gaps, sep="\n")
            results["launch_gaps"] = [{**asdict(gap), "idle_share": gap.idle_share} for gap in gaps]
        return {**results, "failures": self.failures, "took_s": time.monotonic() - began_s}

    def _has_quantized_products(self, tokens: int) -> bool:
        return self.on_gpu or ("cpu" in self.sets and tokens <= _OTHER_TIERS_TOKENS)

    @property
    def _layer(self) -> LayerShape:
        """Whose linear maps and small operations are measured."""
        return SHAPE_8B if self.on_gpu else SHAPE_135M

    def _shapes(self) -> list[AttentionShape]:
        """Those whose KV fits into the device as often as peers lay it out again."""
        wanted = [
            shape
            for shape in (CUDA_ATTENTION if self.on_gpu else CPU_ATTENTION)
            if self.head_dim in (None, shape.head_dim)
        ]
        if not self.on_gpu:
            return wanted
        _, total_bytes = torch.cuda.mem_get_info(self.device)
        return [shape for shape in wanted if _LAYOUTS * shape.kv_bytes(_DTYPE) < total_bytes]

    def _tokens(self) -> tuple[int, ...]:
        """Of the steps whose products and small operations are measured."""
        if self.head_dim is not None:
            return ()
        return _CUDA_TOKENS if self.on_gpu else _CPU_TOKENS

    def _measure_attention(self, shape: AttentionShape) -> None:
        """Ours, then the peers; all must agree with the first."""
        batch = AttentionBatch(shape, _DTYPE, self.device)
        kernel, first = "decode" if shape.is_decode else "prefill", None
        own = {name: batch.calls(kernels.attention) for name, kernels in self.sets.items()}
        for name, calls in [*own.items(), *peer_calls(batch)]:
            try:
                result = calls[0]()
                self._time(kernel, str(shape), name, calls, shape.cost(_DTYPE))
            except RuntimeError as error:
                if name in own:
                    raise
                print(f"{name} cannot compute {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            assert isinstance(result, torch.Tensor)
            first = result if first is None else first
            if not (difference := largest_difference(first, result)) <= _MAX_DIFFERENCE:
                self._fail(f"{name} at {shape}: differs by {difference:.3g}")
        for kv_dtype in LARGEST if self._has_quantized_kv(shape) else ():
            batch = AttentionBatch(shape, _DTYPE, self.device, kv_dtype)
            label = f"{shape}, KV {str(kv_dtype).removeprefix('torch.')}"
            for name, kernels in self.sets.items():
                self._time(kernel, label, name, batch.calls(kernels.attention), shape.quantized_cost(_DTYPE))

    def _has_quantized_kv(self, shape: AttentionShape) -> bool:
        return shape.is_decode and (not self.on_gpu or (len(shape.lens), shape.block_size) == _GPU_QUANTIZED_KV)

    def _measure_operations(self, tokens: int) -> None:
        """Linear maps and small operations of one layer, by each distinct implementation."""
        for operations in {kernels.operations.name: kernels.operations for kernels in self.sets.values()}.values():
            for make in (linear_calls, small_calls):
                self._time_all(operations.name, tokens, make(operations, self._layer, tokens, _DTYPE, self.device))

    def _measure_quantized_products(self, tokens: int) -> None:
        """Those that kernels of ours multiply as they are."""
        operations = self.sets["triton" if self.on_gpu else "cpu"].operations
        for form in QuantForm:
            calls = quantized_linear_calls(operations, self._layer, tokens, form, self.device)
            self._time_all(operations.name, tokens, calls)

    def _measure_product_peers(self, tokens: int) -> None:
        """The same linear maps by oneDNN, and by our other tiers if none is forced."""
        peers: list[MakesLinear] = [OneDnn()] if has_one_dnn() else []
        if "cpu" in self.sets and self.cpu_tier is None and tokens <= _OTHER_TIERS_TOKENS:
            peers += other_tiers(self.sets["cpu"].operations.name)
        for peer in peers:
            self._time_all(peer.name, tokens, linear_calls(peer, self._layer, tokens, _DTYPE, self.device))

    def _time_all(self, by: str, tokens: int, operations: Iterable[OperationCalls]) -> None:
        for each in operations:
            self._time(each.name, f"{self._layer.name}, T {tokens}", by, each.calls, each.cost)

    def _time(self, kernel: str, shape: str, by: str, calls: Sequence[Call], cost: Cost) -> None:
        row = Measurement(kernel, shape, by, time_s(calls, self.device, _BUDGET_S), cost)
        self.rows.append(row)
        print(row.row(self.ceilings), flush=True)

    def _try(self, what: str, work: Callable[[], _Result]) -> _Result | None:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - one kernel's failure must not hide the others' figures
            self._fail(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return None

    def _fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED {what}", file=sys.stderr, flush=True)


def kernel_sets(device: torch.device, cpu_tier: str | None = None) -> dict[str, Kernels]:
    """Ours that run here. The reference gathers all KV: on a GPU it is only there to be right."""
    names = [status.name for status in available_backends(device, _DTYPE) if status.usable]
    if device.type == "cuda":
        names = [name for name in names if name != "reference"]
    return {name: select_kernels(name, device, _DTYPE, cpu_tier if name == "cpu" else None) for name in names}


def main() -> int:
    """Measures and records; exit code 1 if anything failed, 0 also where there is no GPU to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="compute threads of a CPU; without it, as many as torch takes")
    parser.add_argument("--cpu-tier", help="instructions of our kernels of a CPU; without it, the best that it has")
    parser.add_argument("--head-dim", type=int, help="attention of this size alone; records nothing")
    args = parser.parse_args()
    sizes = sorted({shape.head_dim for shape in (CUDA_ATTENTION if args.device == "cuda" else CPU_ATTENTION)})
    if args.head_dim not in (None, *sizes):
        parser.error(f"--head-dim: on {args.device} there are shapes of {', '.join(map(str, sizes))}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("not measured: no GPU")
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    with torch.inference_mode():
        results = Run(torch.device(args.device), args.cpu_tier, args.head_dim).measure()
    if args.head_dim is None:
        write_record(f"kernels-{args.device}", results)
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
