"""What meets around a worker's core: the process that serves it, the router that asked, the engine that computes.

    process, stream ─▶ worker.core ─▶ StepEngine ─ engine thread
    router ◀─ RouterPort ◀──┘

Nothing here blocks or awaits but the result of a launched step.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.chunking import EngineSizes
from engine.guides import Guides
from engine.prefix_cache import PrefixCache
from engine.step import SampledToken, Step, StepResult
from shell.clock import Clock
from shell.telemetry.events import ProcessEvents, WorkerEvents
from tandem.errors import TandemError
from tandem.types import UNKNOWN_ROUTE, FinishReason, Handle, KvRoute, TokenId, TokenLogprobs, WaitReason
from tandem.validation import Validator


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a running request goes on, and what is known of it there."""

    choices: frozenset[int]
    """Indices of the choices that go."""
    num_output_tokens: int
    """Tokens of the completion that are known there; of several choices, of the one with the fewest. The KV of the
    prompt is expected, and theirs too where one choice goes."""
    ticket: bytes
    kv_endpoint: bytes


class TokenExtra(NamedTuple):
    """What a router is sent of a token beside its id."""

    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Given with the last token of a choice."""
    score: float | None = None
    """Score of a choice that a beam search found; the same with each of its tokens."""


@dataclass(slots=True)
class TokenColumns:
    """Tokens of one or more choices: a row for each, those of one choice in their order."""

    handles: list[Handle] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    extras: dict[int, TokenExtra] = field(default_factory=dict)
    """By row, ascending; a row that has none is an id and nothing else."""

    def add(self, handle: Handle, index: int, offset: int, token_id: TokenId, extra: TokenExtra | None = None) -> None:
        """Appends a row."""
        if extra is not None:
            self.extras[len(self.handles)] = extra
        self.handles.append(handle)
        self.indexes.append(index)
        self.offsets.append(offset)
        self.token_ids.append(token_id)

    def extend(self, others: TokenColumns) -> None:
        """Appends the rows of `others`."""
        if others.extras:
            first = len(self.handles)
            self.extras |= {first + row: extra for row, extra in others.extras.items()}
        self.handles += others.handles
        self.indexes += others.indexes
        self.offsets += others.offsets
        self.token_ids += others.token_ids

    def rows(self) -> Iterator[tuple[Handle, int, int, TokenId, TokenExtra | None]]:
        """Yields handle, index, offset, token and extra of each row."""
        extras = map(self.extras.get, range(len(self.handles)))
        return zip(self.handles, self.indexes, self.offsets, self.token_ids, extras, strict=True)

    def of(self, handles: Container[Handle]) -> TokenColumns:
        """Returns the rows of these handles."""
        kept = TokenColumns()
        for row in self.rows():
            if row[0] in handles:
                kept.add(*row)
        return kept


class RouterPort(Protocol):
    """What a worker tells one router; `worker.serving.router_session.RouterSession` is one. Compared by identity.

    A request is named by its handle, a choice by its index. After `failed`, or once the router has released the
    handle, what is said of it goes nowhere.
    """

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        """Decode worker: there is room; ticket and endpoint are empty where the prompt is computed here."""

    def prefill_started(self, handle: Handle) -> None:
        """Prefill worker: its first chunk is about to be computed. Answered by `Worker.grant`, or a release."""

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        """The prompt is computed, but for the first `cached_tokens` of it, whose KV was found here.

        Told before the first tokens, which are given to `token` like all others.
        """

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Sends log-probabilities of the prompt's tokens from number `offset` on: without a gap from 1 on, all before
        `prefill_done`.
        """

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        """Token number `offset` of a choice. Goes out with all others of this step, in one message.

        `score`: of a choice that a beam search found; the same with each of its tokens.
        """

    def token_rows(self, columns: TokenColumns) -> None:
        """Takes each row as `token` does; the columns are the port's from now on."""
        for handle, index, offset, token_id, extra in columns.rows():
            logprobs, finish_reason, score = extra or TokenExtra()
            self.token(handle, index, offset, SampledToken(token_id, logprobs), finish_reason, score)

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        """Who handed the KV over: every block is verified and attached. Nothing follows."""

    def leaving(self, handle: Handle) -> None:
        """Decode worker: it drains or is overloaded, and would hand this running request over.

        Answered by `Worker.move`.
        """

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        """Sends all requests that wait for `reason` now. A later message with the same reason replaces an earlier one
        not yet taken.
        """

    def failed(self, handle: Handle, error: TandemError) -> None:
        """The request ended without all its tokens; the worker keeps nothing of it."""


class StepEngine(Protocol):
    """Computes steps, in order; see `engine.engine_thread.EngineThread`."""

    @property
    def num_steps(self) -> int:
        """Steps that have ended since start."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step is launched long before it ends, as on a GPU."""

    def launch(self, step: Step) -> Future[StepResult]:
        """Hands over a step; at most two may be in flight. The seqs' tables have been read when it returns.

        The result raises what the step raised, once the device no longer uses its blocks. It must not be cancelled:
        wait with `shell.thread_work.to_the_end`, which does not end before the step.
        """


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker's core works with; the maker of these parts owns and closes each."""

    engine: StepEngine
    cache: PrefixCache
    sizes: EngineSizes
    validator: Validator
    clock: Clock
    events: WorkerEvents = field(default_factory=ProcessEvents)
    guides: Guides | None = None
    """None = constraints are refused."""
    device_memory: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Bytes of the GPU that are taken, and all; 0 = there is no GPU."""
