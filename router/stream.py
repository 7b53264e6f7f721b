"""Puts one completion's tokens in order; pure.

Tokens come from two workers: the first from prefill, the rest from decode, and decode's second
may overtake prefill's first. After a replay a new pair may repeat what is known. Deltas
leave here contiguous, each token once. Knows nothing of text, workers or clients.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.types import FinishReason, TokenDelta, TokenId


class TokenStream:
    """One completion, from offset 0. Memory is bounded by max_tokens."""

    def __init__(self) -> None:
        self._token_ids: list[TokenId] = []
        self._waiting: dict[int, TokenDelta] = {}
        self._finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> tuple[TokenId, ...]:
        """All tokens let through so far."""
        return tuple(self._token_ids)

    @property
    def next_offset(self) -> int:
        """Offset of the token that is needed next."""
        return len(self._token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set once the last token was let through."""
        return self._finish_reason

    def push(self, delta: TokenDelta) -> list[TokenDelta]:
        """Takes a delta in any order; returns those now in order, trimmed of known tokens."""
        if self._finish_reason is not None:
            return []
        if delta.offset > self.next_offset:
            waiting = self._waiting.get(delta.offset)
            if waiting is None or len(delta.token_ids) >= len(waiting.token_ids):
                self._waiting[delta.offset] = delta
            return []
        ready = self._accept(delta)
        while self._waiting and self._finish_reason is None:
            offset = min(self._waiting)
            if offset > self.next_offset:
                break
            ready += self._accept(self._waiting.pop(offset))
        return ready

    def forget_waiting(self) -> None:
        """Drops what came out of order, from a pair of workers that will not fill the gap."""
        self._waiting.clear()

    def _accept(self, delta: TokenDelta) -> list[TokenDelta]:
        fresh = _after(delta, self.next_offset)
        if fresh is None:
            return []
        self._token_ids.extend(fresh.token_ids)
        self._finish_reason = fresh.finish_reason
        return [fresh]


def _after(delta: TokenDelta, offset: int) -> TokenDelta | None:
    """The part of `delta` from `offset` on; None if that says nothing new."""
    known = offset - delta.offset
    if known == 0:
        return delta if delta.token_ids or delta.finish_reason else None
    if delta.end < offset or (delta.end == offset and delta.finish_reason is None):
        return None
    return replace(delta, offset=offset, token_ids=delta.token_ids[known:], logprobs=delta.logprobs[known:])
