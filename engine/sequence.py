"""One choice's running state on one worker: its tokens, how far KV is computed, its blocks.

A seq lives between `Sequence(spec)` and its last token:

    waiting     no blocks                         after construction and after `preempt`
    prefilling  num_remaining_tokens > 1          chunks of the prompt (or of a resumed text)
    decoding    num_remaining_tokens == 1         the last token's KV is computed by the next step
    finished    finish_reason is set

It decides nothing: the worker's scheduler calls it, and frees what `take_blocks` returns.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.block_table import BlockTable
from engine.step import SampleSpec, ScheduledSeq
from tandem.errors import InternalError
from tandem.types import BlockId, FinishReason, SamplingParams, SequenceSpec, TokenId


def finish_reason_after(sampling: SamplingParams, token_id: TokenId, num_output_tokens: int) -> FinishReason | None:
    """Why a completion ends with `token_id`, its `num_output_tokens`-th token; None if it goes on."""
    if token_id in sampling.end_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= sampling.max_tokens else None


class Sequence:
    """Starts with nothing computed and no blocks. `spec.token_ids` may hold emitted tokens already."""

    def __init__(self, spec: SequenceSpec) -> None:
        if not 0 < spec.num_prompt_tokens <= len(spec.token_ids):
            raise InternalError(f"{spec.request_id}: {spec.num_prompt_tokens} of {len(spec.token_ids)} are prompt")
        self.spec = spec
        self._token_ids = list(spec.token_ids)
        self._prompt_token_ids = spec.token_ids[: spec.num_prompt_tokens]
        self._block_table = BlockTable()
        self._num_computed_tokens = 0
        self._finish_reason: FinishReason | None = None
        sampling = spec.sampling
        self._reads_prompt = sampling.repetition_penalty != 1.0
        self._reads_output = self._reads_prompt or bool(sampling.presence_penalty or sampling.frequency_penalty)

    @property
    def token_ids(self) -> SequenceOf[TokenId]:
        """Prompt and completion; not to be changed by the reader."""
        return self._token_ids

    @property
    def block_table(self) -> BlockTable:
        """Blocks held, in order of position."""
        return self._block_table

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens so far."""
        return len(self._token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Completion tokens so far, those computed elsewhere included."""
        return len(self._token_ids) - self.spec.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV lies in the blocks."""
        return self._num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV must be computed before the next token can be sampled."""
        return len(self._token_ids) - self._num_computed_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set once the completion has ended."""
        return self._finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be sampled."""
        return self._finish_reason is not None

    def blocks_wanted(self, num_tokens: int, block_size: int) -> int:
        """Blocks to add before `num_tokens` more tokens can be computed."""
        return max(0, -(-(self._num_computed_tokens + num_tokens) // block_size) - len(self._block_table))

    def add_blocks(self, blocks: SequenceOf[BlockId]) -> None:
        """Takes over the caller's hold on these blocks."""
        self._block_table.extend(blocks)

    def take_blocks(self) -> BlockTable:
        """Hands every block back to the caller, who releases them; nothing is computed any more.

        Later the seq can start again from its tokens, which it keeps: preemption by recompute.
        """
        blocks, self._block_table = self._block_table, BlockTable()
        self._num_computed_tokens = 0
        return blocks

    def scheduled(self, num_tokens: int) -> ScheduledSeq:
        """This seq's share of a step: its next `num_tokens` tokens; samples if they are the last."""
        start, end = self._num_computed_tokens, self._num_computed_tokens + num_tokens
        if self._finish_reason is not None or not start < end <= len(self._token_ids):
            raise InternalError(f"{self.spec.request_id}: tokens {start}..{end} of {len(self._token_ids)} scheduled")
        return ScheduledSeq(
            token_ids=tuple(self._token_ids[start:end]),
            context_len=start,
            block_table=self._block_table,
            sample=self._sample_spec() if end == len(self._token_ids) else None,
        )

    def advance(self, num_tokens: int) -> None:
        """KV of `num_tokens` more tokens lies in the blocks: computed by a step, or received."""
        if self._num_computed_tokens + num_tokens > len(self._token_ids):
            raise InternalError(f"{self.spec.request_id}: computed beyond its {len(self._token_ids)} tokens")
        self._num_computed_tokens += num_tokens

    def append_token(self, token_id: TokenId) -> FinishReason | None:
        """Adds a sampled token; returns why the completion ends with it, if it does."""
        if self._finish_reason is not None:
            raise InternalError(f"{self.spec.request_id}: a token after its end")
        self._token_ids.append(token_id)
        self._finish_reason = finish_reason_after(self.spec.sampling, token_id, self.num_output_tokens)
        return self._finish_reason

    def _sample_spec(self) -> SampleSpec:
        return SampleSpec(
            params=self.spec.sampling,
            choice_index=self.spec.index,
            output_index=self.num_output_tokens,
            prompt_token_ids=self._prompt_token_ids if self._reads_prompt else (),
            output_token_ids=tuple(self._token_ids[self.spec.num_prompt_tokens :]) if self._reads_output else (),
        )
