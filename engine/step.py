"""What one engine step takes and gives: plain data between scheduler, runner and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tandem.errors import InternalError
from tandem.types import BlockId, RequestId, SamplingParams, TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """One seq's share of a step: compute KV for `token_ids` at positions from `context_len` on.

    If `sample` is set, a next token is drawn from the last of them. `block_table` may be the
    seq's own table, which must not change before the step has returned.
    """

    token_ids: tuple[TokenId, ...]
    context_len: int
    block_table: Sequence[BlockId]
    sample: SampleSpec | None


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Everything that a draw depends on besides the logits."""

    params: SamplingParams
    choice_index: int
    output_index: int
    """Number of the token to draw within the completion, from 0: the generator's counter."""
    prompt_token_ids: tuple[TokenId, ...] = ()
    """Given only if `params` has a repetition penalty."""
    output_token_ids: tuple[TokenId, ...] = ()
    """Given only if `params` has any penalty."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token."""

    token_id: TokenId
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class BrokenLogits:
    """In a token's place: the row holds NaN or has no finite maximum. Other rows of its batch are none the worse."""

    def error(self, request_id: RequestId) -> InternalError:
        """What the request is to be failed with."""
        return InternalError(f"the logits of request {request_id} are not finite")


Sampled: TypeAlias = SampledToken | BrokenLogits
