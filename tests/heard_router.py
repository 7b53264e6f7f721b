"""The router's end of a worker's stream, for tests without a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.step import SampledToken
from tandem.errors import TandemError
from tandem.types import UNKNOWN_ROUTE, FinishReason, Handle, KvRoute, TokenDelta, TokenId, TokenLogprobs, WaitReason
from worker.ports import RouterPort

WAIT_S = 60.0
Choice = tuple[Handle, int]


@dataclass(eq=False)
class HeardRouter(RouterPort):
    """Keeps what it is told, checks that nothing is lost or repeated, and lets tests wait for it."""

    grants: dict[Handle, tuple[bytes, bytes]] = field(default_factory=dict)
    """Tickets and endpoints."""
    held_tokens: dict[Handle, int] = field(default_factory=dict)
    started: list[Handle] = field(default_factory=list)
    times_s: dict[Handle, tuple[float, float]] = field(default_factory=dict)
    cached_tokens: dict[Handle, int] = field(default_factory=dict)
    """Of each prompt that was computed, how many of its tokens were found in the cache."""
    prompt_scores: dict[Handle, list[TokenLogprobs]] = field(default_factory=dict)
    choices: dict[Choice, list[TokenId]] = field(default_factory=dict)
    first_offsets: dict[Choice, int] = field(default_factory=dict)
    finished: dict[Choice, FinishReason] = field(default_factory=dict)
    scores: dict[Choice, float] = field(default_factory=dict)
    num_choices: dict[Handle, int] = field(default_factory=dict)
    """Choices that it waits for."""
    order: list[Choice] = field(default_factory=list)
    """Whose each token was."""
    handoffs: dict[Handle, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds."""
    leaving_handles: set[Handle] = field(default_factory=set)
    waits: dict[WaitReason, list[Handle]] = field(default_factory=dict)
    """The handles of the newest message, by reason."""
    errors: dict[Handle, TandemError] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tickets(self) -> dict[Handle, str]:
        return {handle: ticket.decode() for handle, (ticket, _) in self.grants.items()}

    @property
    def tokens(self) -> dict[Handle, list[TokenId]]:
        """The tokens of each handle's first choice."""
        return {handle: tokens for (handle, index), tokens in self.choices.items() if index == 0}

    @property
    def firsts(self) -> dict[Handle, dict[int, TokenDelta]]:
        """Tokens from prefill workers, by handle and choice; a handle has an entry from `prefill_done` on."""
        firsts: dict[Handle, dict[int, TokenDelta]] = {handle: {} for handle in self.cached_tokens}
        for (handle, index), tokens in self.choices.items():
            offset, reason = self.first_offsets[handle, index], self.finished.get((handle, index))
            firsts[handle][index] = TokenDelta(offset, tuple(tokens), finish_reason=reason, index=index)
        return firsts

    @property
    def first_tokens(self) -> dict[Handle, TokenDelta]:
        """The first tokens of each request's choice 0."""
        return {handle: choices[0] for handle, choices in self.firsts.items() if 0 in choices}

    @property
    def ended(self) -> set[Handle]:
        """Handles all of whose choices have finished."""
        return {h for h, n in self.num_choices.items() if sum(handle == h for handle, _ in self.finished) == n}

    def completions(self, handle: Handle) -> list[list[TokenId]]:
        """The tokens of all choices, by index."""
        return [tokens for (of, _), tokens in sorted(self.choices.items()) if of == handle]

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        self.grants[handle] = (ticket, kv_endpoint)
        self.held_tokens[handle] = held_tokens
        self._news.set()

    def prefill_started(self, handle: Handle) -> None:
        assert handle not in self.cached_tokens
        self.started.append(handle)
        self._news.set()

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        assert min(queue_s, prefill_s) >= 0
        assert handle not in self.cached_tokens
        assert not any(of == handle for of, _ in self.choices)
        self.times_s[handle] = (queue_s, prefill_s)
        self.cached_tokens[handle] = cached_tokens
        self._news.set()

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        assert handle not in self.cached_tokens
        told = self.prompt_scores.setdefault(handle, [])
        assert offset == 1 + len(told), "one was lost or repeated"
        told += logprobs

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        choice = (handle, index)
        assert choice not in self.finished
        assert handle not in self.errors
        self.order.append(choice)
        known = self.choices.setdefault(choice, [])
        assert offset == self.first_offsets.setdefault(choice, offset) + len(known), "a token was lost or repeated"
        known.append(token.token_id)
        if finish_reason is not None:
            self.finished[choice] = finish_reason
        if score is not None:
            assert self.scores.setdefault(choice, score) == score
        self._news.set()

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        assert handle not in self.handoffs
        self.handoffs[handle] = (num_bytes, seconds)
        self._news.set()

    def leaving(self, handle: Handle) -> None:
        self.leaving_handles.add(handle)
        self._news.set()

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        self.waits[reason] = list(handles)

    def failed(self, handle: Handle, error: TandemError) -> None:
        assert handle not in self.errors
        self.errors[handle] = error
        self._news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        """Waits for news until it holds."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()
