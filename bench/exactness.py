"""Are the tokens those of transformers? `python -m bench.exactness --model DIR`, or `--families`.

Greedy, float32, prompts that sit on and beside every block and chunk border, 16 at a time, for
each block size and chunk budget, by the engine alone, disaggregated over each transport, and
colocated (real processes): token ids must be equal. Then bfloat16: the error of the
logits against float64 may be at most 1.2 times that of transformers. Exits 1 if any differ.
`--families` makes the random checkpoints of `bench.support.tiny_models`, `bench.support.tiny_language_parts` and
`bench.support.tiny_transformers` and checks them all; `--only NAME` some of them. `--record FILE` appends each
line and runs nothing again whose line says that all was equal: a run that was ended goes on there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging

from bench.support.exactness import (
    AUTO_IMPL,
    BLOCK_SIZES,
    CHUNK_BUDGETS,
    ENGINE_SYSTEMS,
    SYSTEMS,
    Settings,
    check_system,
    make_workload,
    served_on,
)
from bench.support.logit_error import MAX_RATIO, measure_logit_errors
from bench.support.reference import Reference
from bench.support.tiny_language_parts import TINY_LANGUAGE_PARTS
from bench.support.tiny_models import TINY_MODELS, TinyModel, save_tiny_model
from bench.support.tiny_transformers import TINY_TRANSFORMERS
from models.family import FAMILIES
from models.files.checkpoint import resolve_model

LONGEST_PROMPT = 3000
RANDOM_MODELS = (
    *TINY_MODELS,
    *TINY_LANGUAGE_PARTS,
    *(tiny for tiny in TINY_TRANSFORMERS if tiny.family not in FAMILIES),
)
"""One checkpoint of each shape, by the implementation that `auto` chooses."""


class Record:
    """Lines of results: printed, and kept in a file if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._good = file.read_text().splitlines() if file is not None and file.exists() else []

    def has(self, head: str) -> bool:
        """Whether a line with that head is there."""
        return any(line.startswith(head) for line in self._good)

    def add(self, head: str, result: str, *, is_good: bool) -> None:
        """What is not good is printed alone, so that it runs again."""
        print(head + result, flush=True)
        if self._file is not None and is_good:
            with self._file.open("a") as file:
                file.write(f"{head}{result}\n")


def check_checkpoint(
    label: str, folder: Path, cells: Sequence[tuple[str, Settings]], longest: int, seed: int, record: Record
) -> bool:
    """Checks one checkpoint in every cell that `record` lacks, a line for each; True if all is exact."""
    missing = [cell for cell in cells if not record.has(_cell_head(label, *cell))]
    exact = True
    if missing:
        reference = Reference(folder)
        work = make_workload(folder, reference, longest, seed)
    for name, setting in missing:
        differing = check_system(name, folder, setting, work)
        exact = exact and not differing
        equal = f"{len(work.prompts) - len(differing)}/{len(work.prompts)} prompts equal"
        record.add(_cell_head(label, name, setting), equal, is_good=not differing)
        for number, token in differing:
            prompt, expected = work.prompts[number], work.expected[number]
            gap = reference.margin((*prompt, *expected[:token]))
            print(f"    prompt of {len(prompt)} tokens differs at token {token}; the reference's margin is {gap:.2e}")
    head = f"{label:24} bfloat16 logits: "
    if record.has(head) or any(setting.model_impl != AUTO_IMPL for _, setting in cells):
        return exact
    (error,) = measure_logit_errors(folder, seed)
    within = error.ratio <= MAX_RATIO
    record.add(
        head, f"error {error.ours:.3e}, transformers {error.theirs:.3e}, ratio {error.ratio:.2f}", is_good=within
    )
    return exact and within


def _cell_head(label: str, system: str, settings: Settings) -> str:
    return f"{label:24} {system:9} block {settings.block_size:2} chunk {settings.chunk_tokens:3}  "


def shapes_by(model_impl: str) -> tuple[TinyModel, ...]:
    """What `--families` checks with that implementation."""
    return TINY_TRANSFORMERS if model_impl == "transformers" else RANDOM_MODELS


@contextmanager
def _checkpoints(model: str | None, only: Sequence[str], model_impl: str) -> Iterator[Iterator[tuple[str, Path]]]:
    """Label and folder of each checkpoint; the random ones are made one by one and live as long as the context."""
    if model is not None:
        yield iter([(model, resolve_model(model))])
        return
    prefix = "" if model_impl == AUTO_IMPL else f"{model_impl}:"
    with tempfile.TemporaryDirectory() as folder:
        chosen = (tiny for tiny in shapes_by(model_impl) if not only or tiny.name in only)
        yield ((prefix + tiny.name, save_tiny_model(tiny, Path(folder) / tiny.name)) for tiny in chosen)


def main() -> int:
    """Parses arguments, checks, returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="checkpoint folder, or demo")
    which.add_argument("--families", action="store_true", help="random checkpoints of all families")
    names = {tiny.name for tiny in (*RANDOM_MODELS, *TINY_TRANSFORMERS)}
    parser.add_argument(
        "--only", action="append", choices=sorted(names), metavar="NAME", help="of --families; default: all"
    )
    parser.add_argument("--system", action="append", choices=sorted(SYSTEMS), help="what to check; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where served systems compute")
    parser.add_argument("--block-size", type=int, action="append", help=f"default: {BLOCK_SIZES}")
    parser.add_argument("--chunk-tokens", type=int, action="append", help=f"default: {CHUNK_BUDGETS}")
    parser.add_argument("--longest", type=int, default=LONGEST_PROMPT, help="longest prompt in tokens")
    parser.add_argument("--model-impl", choices=(AUTO_IMPL, "native", "transformers"), default=AUTO_IMPL)
    parser.add_argument("--record", type=Path, help="file of lines: those that it has are not run again")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar: Callable[[], None] = logging.disable_progress_bar
    disable_progress_bar()
    systems = args.system or sorted([*ENGINE_SYSTEMS, *served_on(args.device)])
    cells = [
        (system, Settings(block_size, chunk_tokens, args.device, args.model_impl))
        for system in systems
        for block_size in args.block_size or BLOCK_SIZES
        for chunk_tokens in args.chunk_tokens or CHUNK_BUDGETS
    ]
    record = Record(args.record)
    with _checkpoints(args.model, args.only or (), args.model_impl) as checkpoints:
        results = [
            check_checkpoint(label, folder, cells, args.longest, args.seed, record) for label, folder in checkpoints
        ]
    print(f"{sum(results)} of {len(results)} checkpoints are exact")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
