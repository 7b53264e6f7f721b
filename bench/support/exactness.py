"""Prompts on and beside every block and chunk border, and whether a system continues them as transformers does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from bench.support.reference import Reference
from bench.support.served_systems import SERVED_SYSTEMS
from bench.support.systems import ENGINE_SYSTEMS, Settings
from models.files.checkpoint import read_checkpoint

SYSTEMS = {**ENGINE_SYSTEMS, **SERVED_SYSTEMS}
BLOCK_SIZES = (1, 16, 64)
CHUNK_BUDGETS = (64, 512)
MAX_TOKENS = 64
TOGETHER = 16
"""Prompts given to the system at once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and the completions that transformers gives them."""

    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[list[int], ...]
    max_tokens: int


def border_lengths(longest: int) -> list[int]:
    """Prompt lengths on and beside the borders of blocks and chunks, and the ends of the range."""
    borders = {multiple * size for size in (*BLOCK_SIZES[1:], *CHUNK_BUDGETS) for multiple in (1, 2, 3)}
    borders |= {1, 2048, longest}
    lengths = {border + beside for border in borders for beside in (-1, 0, 1)}
    return sorted(length for length in lengths if 1 <= length <= longest)


def make_workload(
    folder: Path, reference: Reference, longest: int, seed: int, max_tokens: int = MAX_TOKENS
) -> Workload:
    """Random prompts of every border length that the model's context admits."""
    config = read_checkpoint(str(folder))
    rng = random.Random(seed)
    lengths = border_lengths(min(longest, config.context_tokens - max_tokens))
    rng.shuffle(lengths)  # so that each batch mixes long and short
    prompts = tuple(tuple(rng.randrange(config.vocab_size) for _ in range(length)) for length in lengths)
    return Workload(prompts, tuple(reference.generate(prompt, max_tokens) for prompt in prompts), max_tokens)


def check_system(name: str, folder: Path, settings: Settings, work: Workload) -> list[tuple[int, int]]:
    """Runs the workload; returns (prompt number, first wrong token) of each completion that differs."""
    completions: list[list[int]] = []
    with SYSTEMS[name](folder, settings) as system:
        for start in range(0, len(work.prompts), TOGETHER):
            completions += system.generate(work.prompts[start : start + TOGETHER], work.max_tokens)
    differing = []
    for number, (ours, theirs) in enumerate(zip(completions, work.expected, strict=True)):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            differing.append((number, next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))))
    return differing
