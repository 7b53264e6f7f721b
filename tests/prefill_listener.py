"""The router's side of a prefill worker's stream, for tests without a router."""

from __future__ import annotations

from collections.abc import Sequence

from engine.step import SampledToken
from tandem.errors import TandemError
from tandem.types import FinishReason, Handle, TokenId, TokenLogprobs, WaitReason
from tests.receiving_pool import Arrivals
from worker.ports import RouterPort


class RecordingRouter(RouterPort):
    """A router's stream that keeps what it is told."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.first_tokens: dict[Handle, dict[int, TokenId]] = {}
        self.cached_tokens: dict[Handle, int] = {}
        self.num_bytes: dict[Handle, int] = {}
        self.errors: dict[Handle, TandemError] = {}

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        raise AssertionError("a prefill worker reserves nothing")

    def prefill_started(self, handle: Handle) -> None:
        assert handle not in self.first_tokens

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        """Not looked at here."""

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        assert queue_s >= 0
        assert prefill_s > 0
        self.first_tokens[handle] = {}
        self.cached_tokens[handle] = cached_tokens

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        self.first_tokens[handle][index] = token.token_id
        self.arrivals.note()

    def leaving(self, handle: Handle) -> None:
        raise AssertionError("only a decode worker that drains says so")

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        assert seconds > 0
        self.num_bytes[handle] = num_bytes
        self.arrivals.note()

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        raise AssertionError("nobody asked for them")

    def failed(self, handle: Handle, error: TandemError) -> None:
        self.errors[handle] = error
        self.arrivals.note()
