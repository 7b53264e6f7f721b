"""A sequence that was let in: its arrival, its running state, and what its router has been told."""

from __future__ import annotations

from decode_worker.arrival import Arrival
from decode_worker.scheduler import Rank
from engine.sequence import Sequence
from engine.step import SampledToken
from tandem.types import BlockId, TokenDelta, TokenId


class Resident:
    """Compared by identity. `Schedulable`."""

    def __init__(self, arrival: Arrival) -> None:
        """A sequence whose prompt is computed here; it holds no blocks yet."""
        self.arrival = arrival
        self.rank: Rank = arrival.rank
        """Its place in line."""
        self.sequence = Sequence(arrival.spec)
        self._num_tokens_brought = len(arrival.spec.token_ids)
        self.started_s: float | None = None
        """When its first tokens were scheduled; None before."""
        self.owes_first_token = True
        """Whether the next token is to be announced as the prompt's result."""

    @classmethod
    def landed(cls, arrival: Arrival, block_ids: tuple[BlockId, ...], first_token: TokenId) -> Resident:
        """One whose prompt's KV was received into `block_ids`; it takes them over.

        The first token was announced by the prefill worker; its KV is computed in the next step.
        """
        resident = cls(arrival)
        resident.owes_first_token = False
        resident.sequence.add_blocks(block_ids)
        resident.sequence.advance(len(arrival.spec.token_ids))
        resident.sequence.append_token(first_token)
        resident._num_tokens_brought += 1
        return resident

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return self.sequence.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV lies in its blocks."""
        return self.sequence.num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks it holds."""
        return len(self.sequence.block_table)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled here: not those that it brought, nor the one that came with its hand-off."""
        return self.sequence.num_tokens - self._num_tokens_brought

    def take_token(self, sampled: SampledToken) -> TokenDelta:
        """Appends a sampled token; returns what its router is to be told."""
        offset = self.sequence.num_output_tokens
        finish_reason = self.sequence.append_token(sampled.token_id)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        return TokenDelta(offset, (sampled.token_id,), logprobs, finish_reason)
