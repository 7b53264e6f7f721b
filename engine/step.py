"""What one engine step takes and gives: plain data between scheduler, runner and sampler.

A step is launched once and ends once. Two may be in flight: the second may take as its input
what the first draws (`ScheduledSeq.feed`). The order within a step is

    moves out of the pool → moves into it → block copies → KV and logits of all seqs → draws
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.history import TokenHistory
from tandem.errors import InternalError, TandemError
from tandem.types import BlockId, RequestId, SamplingParams, TokenId, TokenLogprobs

TokenMask: TypeAlias = npt.NDArray[np.uint32]
"""`[ceil(V / 32)]`: bit `t % 32` of word `t // 32` is set where token t may be drawn."""
HostRow = NewType("HostRow", int)
"""Index of a block's place in the host tier; ids of its own, no block ids of the pool."""


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
    row: HostRow
    direction: Direction


@dataclass(frozen=True, slots=True)
class FixedChanges:
    """What a choice's parameters change in its logits in every step alike."""

    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    """Of each of `bias_ids`."""
    end_ids: npt.NDArray[np.int64]
    """Not to be drawn before min_tokens."""


class SampleSpec(NamedTuple):
    """One draw, and everything that it depends on besides the logits.

    A tuple, as all that is made once per seq and step: it costs a third of a frozen dataclass.
    """

    params: SamplingParams
    """With the seed of the choice that draws."""
    output_index: int
    """Number of the token to draw within the completion, from 0: the generator's counter."""
    history: TokenHistory | None = None
    """Given only if `params` has a penalty; without the token that a feed brings, which is added where it is drawn.

    May be the seq's own: `launch` reads it before it returns.
    """
    from_end: int = 0
    """From which of the seq's scheduled tokens: 0 = the last, 1 = the one before, …"""
    num_candidates: int = 0
    """0 = one token is drawn as `params` say; k = the k best with their log-probabilities, best first (beam search).

    Fewer where the mask leaves fewer. As in transformers' beam search, biases, penalties and mask change the
    log-probabilities of the raw logits, which are not normalized again; temperature and filters have no effect.
    """
    mask: TokenMask | None = None
    """Tokens that may be drawn; None = all."""
    fixed: FixedChanges | None = None
    """Of `params`, if it is kept; None = made where it is needed."""


class ScoredTokens(NamedTuple):
    """Known tokens of which the log-probabilities are wanted: each as the one that follows a scheduled token."""

    token_ids: tuple[TokenId, ...]
    first_row: int
    """Which of the seq's scheduled tokens the first of them follows; the others follow the next ones."""
    num_top: int
    """How many of the best tokens are wanted for each."""


class ScheduledSeq(NamedTuple):
    """One seq's share of a step: compute KV for `token_ids` at positions from `context_len` on.

    `block_table` may be the seq's own table: `launch` reads it before it returns.
    """

    token_ids: tuple[TokenId, ...]
    context_len: int
    block_table: Sequence[BlockId]
    samples: tuple[SampleSpec, ...] = ()
    """Draws from its logits; several choices may draw from one row."""
    feed: int | None = None
    """Set where the last of `token_ids` is not known yet: it is what draw number `feed` of the step launched just
    before brings (the best, of candidates), counted over all its seqs; `token_ids` holds 0 in its place."""
    scored: ScoredTokens | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step; never empty."""

    seqs: Sequence[ScheduledSeq]
    """A tuple, or `decode_rows.StepSeqs`."""
    copies: tuple[BlockCopy, ...] = ()
    """Made as if one after the other: a source that its last holder let go may be a later copy's target."""
    moves: tuple[TierMove, ...] = ()
    """No block is moved into twice, and none that is moved into is the source of a copy."""


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
    """One drawn token, or one candidate; `logprobs` where they were asked for."""

    token_id: TokenId
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class BrokenLogits:
    """In the place of tokens: the row holds NaN or has no finite maximum. Other rows of its batch are not affected."""

    def error(self, request_id: RequestId) -> StepFailed:
        """What the request fails with."""
        return StepFailed(f"the logits of request {request_id} are not finite")


Sampled: TypeAlias = tuple[SampledToken, ...] | BrokenLogits
"""What one SampleSpec brought: one token, or its candidates."""
Scores: TypeAlias = tuple[TokenLogprobs, ...] | BrokenLogits
"""What one ScoredTokens brought: one for each token."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, and how long it took."""

    outputs: Sequence[tuple[Sampled, ...]]
    """Per seq in order, one `Sampled` for each of its `samples`."""
    seconds: float
    scored: Mapping[int, Scores] = field(default_factory=dict)
    """By number of seq, for those that have `scored`."""
