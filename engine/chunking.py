"""How a step's token budget is shared among waiting prompts: pure, first come first served.

The head of the line always gets tokens, so each prompt ends after finitely many steps whatever
comes behind it; what the head leaves over goes to the next ones, so that many short prompts
share one ragged step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.decision import Decision, decision

_CPU_TOKENS = 512
_GPU_TOKENS = 2048
"""Where others decode in the same step; fewer tokens do not fill a GPU."""
_GPU_ALONE_TOKENS = 4096
"""Where nobody does: launches are hidden behind more work."""


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The most tokens of prompts in a step."""

    beside: int
    """Beside sequences that decode."""
    alone: int
    """Beside none. A prompt that comes waits for one such step at most: no more than keep the device busy."""

    @classmethod
    def of(cls, asked: int, device: torch.device, full_tokens: int | None) -> ChunkTokens:
        """Returns the sizes that were asked for, or for 0 the device's. `full_tokens`: see `Kernels.full_tokens`."""
        if asked:
            return cls(asked, asked)
        if device.type == "cuda":
            return cls(_GPU_TOKENS, _GPU_ALONE_TOKENS)
        return cls(_CPU_TOKENS, min(full_tokens or _CPU_TOKENS, _CPU_TOKENS))

    def decision(self, asked: int, device: torch.device) -> Decision:
        """Returns why the sizes are these."""
        value = f"at most {self.beside} tokens beside sequences that decode, {self.alone} beside none"
        return decision("chunks of prompts", value, "--chunk-tokens", asked, f"by device: {device.type}")


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How large the steps and sequences of an engine become: as the options say, or by the device."""

    chunk_tokens: ChunkTokens
    max_seqs: int
    """Sequences of a step."""
    max_sequence_tokens: int
    """Longest sequence, completion included, that context and pool can hold."""
    rungs: tuple[int, ...] = ()
    """Tokens, ascending, to whose next number a step with chunks is padded (`engine.graph_shapes`); beyond the last no
    step is."""


def plan_chunks(remaining_tokens: Sequence[int], budget_tokens: int, max_seqs: int) -> list[int]:
    """Returns one chunk length per waiting seq, in the order given; 0 = not in this step.

    `remaining_tokens`: tokens each seq still has to compute, oldest first, each > 0.
    The sum never exceeds `budget_tokens`, and at most `max_seqs` chunks are not empty. All
    seqs that get tokens stand before all that get none, and only the last may be cut short.
    """
    chunks, left = [0] * len(remaining_tokens), max(0, budget_tokens)
    for index, remaining in enumerate(remaining_tokens[: max(0, max_seqs)]):
        chunks[index] = min(remaining, left)
        left -= chunks[index]
    return chunks
