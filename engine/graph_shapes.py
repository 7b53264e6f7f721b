"""Which steps are captured as CUDA graphs: a ladder of shapes, to whose sizes the inputs of a step are padded. Pure.

    decode   B seqs of one token, each draws: T = B         by batch size and bound on the context
    rung     chunks and decodes of B seqs, T > B tokens     by T, at the largest bound

A padding seq has no block: in a decode it is one token of length 0, in a rung it is empty, and its table is not read. A
padding token is token 0 in no slot. A bound sizes grids and workspaces; what a rung's kernels do hardly depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.upload import Array

MAX_CAPTURED_SEQS = 512
"""Decodes of larger batches compute long enough to hide their launches."""
PROMPTS_BESIDE = 16
"""Prompts for other workers in a step with a full batch, beyond its seats: with more the step is not captured."""
FLASH_RUNG = 1024
"""Largest rung of a worker that computes prompts alone with FlashAttention: no graph holds its kernels, which gain more
than launches cost beyond it."""
_SPACING = ((2, 1), (4, 2), (8, 4), (64, 8), (128, 16), (256, 32))
"""`(up to, step)`: from 16 on, less than a third of the rows is padding. 64 beyond the last."""
_RUNG_SPACING = ((512, 64), (1024, 128), (2048, 256))
"""As `_SPACING`, for tokens: beyond 512, where products take longer with each token, at most a fifth is padding."""
_LAST_RUNG_STEP = 512
_CONTEXT_BOUNDS = (2048, 8192)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What is fixed in a graph."""

    num_tokens: int
    """T, padding included, as in all sizes here."""
    num_seqs: int
    """B, and so many rows of logits: T for decodes, less for a rung."""
    max_seq_len: int
    """No seq is longer."""

    @property
    def is_decode(self) -> bool:
        """Whether each seq computes a single token and draws."""
        return self.num_tokens == self.num_seqs

    @property
    def query_lens_bound(self) -> tuple[int, ...]:
        """Lengths on the host while the graph is captured: of a rung, seqs of one token and of more, so that the
        kernels of both are in it.
        """
        return (1,) * self.num_seqs if self.is_decode else (*(1,) * (self.num_seqs - 1), self.num_tokens)

    def empty_inputs(self) -> tuple[Array, ...]:
        """Returns token ids, positions, slots `[T]`, sampled tokens `[B]`, `cu_seqlens_q` `[B + 1]`, lengths `[B]`."""
        num_tokens, num_seqs = self.num_tokens, self.num_seqs
        return (
            np.zeros(num_tokens, np.int64),
            np.zeros(num_tokens, np.int64),
            np.full(num_tokens, -1, np.int64),
            np.arange(num_seqs, dtype=np.int64) if self.is_decode else np.zeros(num_seqs, np.int64),
            np.arange(num_seqs + 1, dtype=np.int32) if self.is_decode else np.zeros(num_seqs + 1, np.int32),
            np.zeros(num_seqs, np.int32),
        )

    def padded(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Returns `inputs`, in the order of `empty_inputs`, at the sizes of the shape."""
        padded = self.empty_inputs()
        for to, array in zip(padded, inputs, strict=True):
            to[: len(array)] = array
        starts, used = padded[4], len(inputs[4])
        if not self.is_decode:
            starts[used:] = starts[used - 1]
        return padded


@dataclass(frozen=True, slots=True)
class GraphLadder:
    """The shapes to capture; each part ascending."""

    batch_sizes: tuple[int, ...]
    rungs: tuple[int, ...]
    rung_seqs: int
    """Seqs of each rung that has more tokens than this."""
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, decode_seqs: int, rung_tokens: int, rung_seqs: int, max_seq_len: int) -> GraphLadder:
        """`decode_seqs`: largest batch of decodes, 0 = none; the others: most tokens and seqs of other steps."""
        seqs = max(2, rung_seqs)  # since one seq cannot have one token and several
        return cls(batch_sizes(decode_seqs), token_rungs(rung_tokens), seqs, context_bounds(max_seq_len))

    def within(self, max_seq_len: int) -> GraphLadder:
        """Returns the ladder for seqs that are no longer than that, either."""
        return replace(self, bounds=context_bounds(min(self.bounds[-1], max_seq_len)))

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Returns all shapes, the largest first."""
        rungs = [GraphShape(rung, min(rung - 1, self.rung_seqs), self.bounds[-1]) for rung in self.rungs]
        decodes = [GraphShape(size, size, bound) for size in self.batch_sizes for bound in self.bounds]
        return tuple(sorted(rungs + decodes, key=lambda each: (each.num_tokens, each.max_seq_len), reverse=True))


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending, up to `largest` itself; none for 0."""
    sizes = {largest} if largest else set()
    size = 1
    while size < largest:
        sizes.add(size)
        size += next((step for limit, step in _SPACING if size < limit), 64)
    return tuple(sorted(sizes))


def token_rungs(most_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of tokens to capture, ascending; the last is at least `most_tokens`."""
    rungs = [_RUNG_SPACING[0][1]]
    while rungs[-1] < most_tokens:
        rungs.append(rungs[-1] + next((step for limit, step in _RUNG_SPACING if rungs[-1] < limit), _LAST_RUNG_STEP))
    return tuple(rungs)


def context_bounds(max_seq_len: int) -> tuple[int, ...]:
    """Bounds on the longest seq to capture for, ascending, up to `max_seq_len` itself."""
    return (*(bound for bound in _CONTEXT_BOUNDS if bound < max_seq_len), max_seq_len)
