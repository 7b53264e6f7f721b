"""Where the work of a worker comes from: sources, each with requests of one kind from their arrival to their end.

    prompts   `prefill_worker.prompts`   computed here, handed over      Prefill, Grant
    decodes   `decode_worker.decodes`    received or computed, decoded   Reserve, HandOver

A role is which of them a worker has: a prefill worker the first, a decode worker the second, an elastic worker both.
The core (`worker.core`) takes requests in and ends each once; the loop (`worker.steps`) computes what they plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.sequence import Sequence
from engine.step import DrawnTokens, SampledToken, Step
from tandem.errors import TandemError
from tandem.types import GroupSpec, Handle, WaitReason, WorkerLoad
from worker.ports import Destination, RouterPort
from worker.request import Request

Pair: TypeAlias = tuple[Request, Sequence]
"""A sequence that takes part in a step, and its request."""
Wait: TypeAlias = tuple[Request, WaitReason]
"""A request that is held here and gets no tokens now, and what the request waits for."""


@dataclass(frozen=True, slots=True)
class BatchedStep:
    """A step to be launched, and the request of each of its seqs."""

    step: Step
    rows: tuple[Pair, ...]
    """In the order of `step.rows`; each draws one token: draw number i is row i's."""
    chunks: tuple[Pair, ...]
    """In the order of `step.chunks`."""
    planned: tuple[Request, ...]
    """Requests of the step that may not have been in a step before."""

    @property
    def seqs(self) -> tuple[Pair, ...]:
        """Returns rows, then chunks."""
        return self.rows + self.chunks

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the tokens in chunks."""
        return sum(len(chunk.token_ids) for chunk in self.step.chunks)

    @property
    def unsettled(self) -> Collection[Sequence]:
        """Returns the sequences that the host must see before they go on: of chunks that draw or are scored."""
        chunks = zip(self.chunks, self.step.chunks, strict=True)
        return {seq for (_, seq), chunk in chunks if chunk.samples or chunk.scored is not None}

    def is_continued_by(self, chunks: Collection[Pair]) -> bool:
        """Whether any of `chunks`, of the next step, goes on behind a chunk of this one."""
        return not {seq for _, seq in self.chunks}.isdisjoint(seq for _, seq in chunks)

    @property
    def is_decode(self) -> bool:
        """Whether the step computes no chunk."""
        return not self.chunks


class Owner(Protocol):
    """The core, as its sources see this core."""

    def end(self, request: Request, error: TandemError | None = None) -> None:
        """Ends a request, finished (None) or failed; `Source.forget` follows. A no-op if the request has ended."""

    def changed(self) -> None:
        """Makes the core look again: there may be room, or work, or nothing left."""


class Source(Protocol):
    """Requests of a kind. All calls on the loop."""

    @property
    def is_moving(self) -> bool:
        """Whether anything is under way that may move a line of this worker."""

    @property
    def is_settled(self) -> bool:
        """Whether no request is here, and nobody else uses blocks of a request."""

    def add_to(self, load: WorkerLoad) -> WorkerLoad:
        """Returns the load with this source's share added."""

    def waits(self, *, line_moves: bool) -> Iterator[Wait]:
        """Returns the requests that get no tokens now; those in a line only if the line moves."""

    # --- a request's way ---

    def check(self, spec: GroupSpec) -> None:
        """Raises what makes the worker refuse a request."""

    def add(self, request: Request) -> None:
        """Takes a new request; `enter` or `forget` follows."""

    def enter(self, request: Request) -> None:
        """Puts a request whose grammar is known in line. Raises what makes the request fail."""

    def forget(self, request: Request, error: TandemError | None) -> None:
        """Releases what an ended request holds. Called once."""

    # --- steps ---

    def next_step(self) -> BatchedStep | None:
        """Returns a step, planned with none in flight; None = nothing can be computed now."""

    def step_behind(self, running: BatchedStep, *, with_prompts: bool) -> BatchedStep | None:
        """Returns a step behind the one in flight; None = the next step is better planned once that has ended.

        `with_prompts`: whether either may compute prompts. `running.unsettled` sit out.
        """

    def apply(self, request: Request, seq: Sequence, drawn: list[tuple[SampledToken, ...]]) -> None:
        """Takes the results of a chunk. `drawn`: once the seq's last token is computed, one token for each
        of its drawers, or the candidates of a beam.
        """


class PromptSource(Source, Protocol):
    """Prompts that are computed for other workers."""

    def grant(self, request: Request, ticket: bytes, kv_endpoint: bytes) -> None:
        """Lets the hand-off of a request open."""

    def started(self, request: Request) -> None:
        """Notes that the first tokens of a request are about to be computed."""


class DecodeSource(Source, Protocol):
    """Requests that decode here."""

    def apply_rows(self, batched: BatchedStep, drawn: DrawnTokens) -> Collection[Request]:
        """Takes the results of a step's rows; returns the requests whose logits are broken."""

    def tick(self) -> None:
        """Lets time run out. Called at intervals."""

    def admit(self) -> None:
        """Takes requests that fit out of the line. Called when something has changed."""

    def drain(self, *, again: bool = False) -> None:
        """Offers running requests to other workers; `again`: also those that were offered before."""

    def move(self, request: Request, to: Destination) -> None:
        """Gives a running request to another worker. Raises what makes the request fail."""

    def released(self, router: RouterPort, handle: Handle | None = None) -> None:
        """Notes that a router knows what became of a request, or of all its requests. Idempotent."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a worker, at least a single source."""

    prompts: PromptSource | None = None
    decodes: DecodeSource | None = None

    def __iter__(self) -> Iterator[Source]:
        yield from (each for each in (self.prompts, self.decodes) if each is not None)

    def of(self, request: Request) -> Source:
        """Returns the source that holds a request."""
        source: Source | None = self.prompts if request.for_another else self.decodes
        assert source is not None
        return source

    @property
    def planner(self) -> Source:
        """Returns the source that plans the steps: the decodes, also for prompts beside them."""
        source: Source | None = self.decodes or self.prompts
        assert source is not None
        return source
