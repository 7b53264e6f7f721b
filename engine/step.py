"""What one engine step takes and gives: plain data between scheduler, runner and sampler.

    rows      decodes, as columns: each computes its newest token and draws the next one
    chunks    shares of prompts, an object each; the last one of a prompt draws each choice's first token

Rows may take as their input what the step launched just before draws (`DecodeRows.feeds`), and chunks go on behind its
chunks. The order within a step is

    moves out of the pool → moves into it → block copies → KV and logits of all seqs → draws

The control loop launches a step (`engine_thread`), which ends once, with a result or an error. Two may be in flight;
a step that is fed by a failed one fails. A broken row of logits fails its own draw alone. The engine frees nothing: the
planner of the steps frees a block once the last launched step that touches the block has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.draws import Draws, SampleSpec
from engine.history import Ints
from tandem.errors import InternalError, TandemError
from tandem.types import BlockId, RequestId, TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the whole of `source` is copied to `target`, across all layers."""

    source: BlockId
    target: BlockId


class Direction(enum.Enum):
    """Which way a block moves between the pool and the host tier."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class TierMove:
    """The whole of a block is copied to a row of the host tier, or back."""

    block: BlockId
    row: int
    """Number of the block's place in the host tier."""
    direction: Direction


class ScoredTokens(NamedTuple):
    """Known tokens of which the log-probabilities are wanted: each as the one that follows a scheduled token."""

    token_ids: tuple[TokenId, ...]
    first_row: int
    """Which of the seq's scheduled tokens the first of them follows; the others follow the next ones."""
    num_top: int
    """How many of the best tokens are wanted for each."""


class ScheduledSeq(NamedTuple):
    """A chunk of a prompt: compute KV for `token_ids` at positions from `context_len` on.

    `block_table` may be the seq's own table: `launch` reads it before it returns.
    """

    token_ids: tuple[TokenId, ...]
    context_len: int
    block_table: Sequence[BlockId]
    samples: tuple[SampleSpec, ...] = ()
    """Draws from its logits; several choices may draw from the same row."""
    scored: ScoredTokens | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B > 0 decodes of one step; draw i is row i's. The arrays are the step's own."""

    token_ids: Ints
    """`[B]`: each seq's newest token; 0 where a feed brings it."""
    context_lens: Ints
    """`[B]`: position of that token."""
    tables: npt.NDArray[np.int32]
    """`[B, W]`: each seq's blocks, -1 behind them; W is at least what this step reads or writes."""
    draws: Draws
    feeds: Ints | None = None
    """`[B]`: number of the draw of the step launched just before that brings the newest token (the best of candidates),
    -1 where it is known; None = all are."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, chunks: Sequence[ScheduledSeq], feeds: Sequence[int] | None = None) -> DecodeRows:
        """Returns decodes that are given as chunks of one token with one draw each."""
        tables = np.full((len(chunks), max(len(chunk.block_table) for chunk in chunks)), -1, np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.block_table)] = chunk.block_table
        return cls(
            np.array([token_id for chunk in chunks for token_id in chunk.token_ids], np.int64),
            np.array([chunk.context_len for chunk in chunks], np.int64),
            tables,
            Draws.of([spec for chunk in chunks for spec in chunk.samples]),
            None if feeds is None else np.array(feeds, np.int64),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A step; never empty."""

    chunks: tuple[ScheduledSeq, ...]
    copies: tuple[BlockCopy, ...] = ()
    """Copies, made as if one after the other: a source that its last holder released may be a later copy's target."""
    moves: tuple[TierMove, ...] = ()
    """No block is moved into twice, and none that is moved into is the source of a copy."""
    rows: DecodeRows | None = None
    continues: bool = False
    """Whether a chunk goes on behind tokens that the step launched just before computes: that one feeds this one."""


class StepFailed(InternalError):
    """A step broke, or what it computed for one request: another worker, or another life of this one, may do better."""

    retryable = True

    @classmethod
    def of(cls, error: Exception) -> StepFailed:
        """What the requests of a step fail with that raised `error`."""
        if isinstance(error, StepFailed):
            return error
        why = error.message if isinstance(error, TandemError) else type(error).__name__
        return cls(f"a step failed: {why}")


class SampledToken(NamedTuple):
    """A drawn token, or a candidate; `logprobs` if asked for."""

    token_id: TokenId
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class BrokenLogits:
    """In the place of tokens: the row holds NaN or has no finite maximum. Other rows of its batch are not affected."""

    def error(self, request_id: RequestId) -> StepFailed:
        """What the request fails with."""
        return StepFailed(f"the logits of request {request_id} are not finite")


Sampled: TypeAlias = tuple[SampledToken, ...] | BrokenLogits
"""What a SampleSpec brought: a token, or its candidates."""
Scores: TypeAlias = tuple[TokenLogprobs, ...] | BrokenLogits
"""What a ScoredTokens brought: log-probabilities for each token."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What the draws of a step brought."""

    token_ids: Sequence[TokenId] = ()
    """By number of draw: the token, the best of candidates, or -1 where the row of logits is broken."""
    more: Mapping[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    """By number of draw: the token with its log-probabilities, or the candidates."""

    def __getitem__(self, number: int) -> Sampled:
        if self.token_ids[number] < 0:
            return BrokenLogits()
        return self.more.get(number) or (SampledToken(self.token_ids[number], None),)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, and the time that this took."""

    outputs: Sequence[tuple[Sampled, ...]]
    """Per chunk in order, a `Sampled` for each of its `samples`."""
    seconds: float
    scored: Mapping[int, Scores] = field(default_factory=dict)
    """By number of chunk, for chunks that have `scored`."""
    drawn: DrawnTokens = DrawnTokens()
    """By number of draw; the first ones are the rows'."""
