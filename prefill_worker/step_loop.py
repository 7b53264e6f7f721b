"""The step loop: plan, launch, await, apply, tell the listener. Owns the blocks of prompts.

Blocks are taken when the scheduler admits a request, from the prefix cache as far as that knows the prompt, and given
back at one place, `_free`: when the prompt is computed, fails or is removed. Full blocks become known to the cache as
soon as a step has computed them. INVARIANT: blocks of a prompt that the
engine computes are freed only after that step has ended, else another prompt's KV would be
overwritten; `remove` defers it.

One step is in flight: a prefill step takes tens to hundreds of milliseconds, and planning the next
one well under one, so `--overlap-steps` (decode) would gain nothing here and delay every first token.

Woken by events, never by a timer. Knows no routers and no transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.engine_thread import EngineBroken
from engine.prefix_cache import PrefixCache
from engine.step import BrokenLogits, Sampled, SampledToken, Scores, Step, StepFailed, StepResult
from engine.thread_work import to_the_end
from prefill_worker.scheduler import BatchLimits, Chunk, PrefillScheduler
from shell.clock import Clock
from shell.telemetry.logging import get_logger
from shell.telemetry.observers import StepReport, WorkerObserver
from tandem.errors import TandemError
from tandem.types import TokenId
from worker.ports import StepEngine
from worker.request import Request
from worker.token_rate import TokenRate

_log = get_logger(__name__)


class StepListener(Protocol):
    """Told what became of requests. Called on the loop; may call `remove` for the request it is told of."""

    def prompt_started(self, request: Request) -> None:
        """Its first chunk is about to be computed."""

    def lent_blocks(self) -> Mapping[str, int]:
        """Blocks that prompts computed before still hold, by destination."""

    def chunk_computed(self, request: Request) -> None:
        """More of the prompt has KV, found or computed."""

    def prompt_computed(self, request: Request, drawn: tuple[tuple[SampledToken, ...], ...]) -> None:
        """All of it has KV; per drawer of its prefix, in order, one token, or the candidates of a beam search.

        The prefix's blocks are given back right after the call: retain what is still needed.
        """

    def request_failed(self, request: Request, error: TandemError) -> None:
        """A step with this request failed, or its logits are broken; its blocks were given back."""

    def step_ended(self) -> None:
        """After the calls for every request of a step."""


class StepLoop:
    """Runs prompts of one worker through its engine until their first tokens are drawn."""

    def __init__(
        self,
        engine: StepEngine,
        cache: PrefixCache,
        limits: BatchLimits,
        clock: Clock,
        listener: StepListener,
        observer: WorkerObserver,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._pool = cache.pool
        self._clock = clock
        self._listener = listener
        self._observer = observer
        self.scheduler = PrefillScheduler(limits, cache.pool.block_size, cache.pool.num_blocks)
        """For others: its counters only."""
        self.rate = TokenRate()
        self.num_computed_tokens = 0
        """Prompt tokens that were computed so far."""
        self._wake = asyncio.Event()
        self._in_flight: tuple[Chunk, ...] = ()

    @property
    def num_tokens_in_flight(self) -> int:
        """Tokens that the engine computes now."""
        return sum(chunk.num_tokens for chunk in self._in_flight)

    def add(self, request: Request) -> None:
        """Puts a request in line. Its prompt's blocks must fit into an empty pool."""
        prefix = request.spec.cache_salt, self._tokens_to_find(request)
        self.scheduler.add(request, self._cache.match(*prefix))
        self._cache.prefetch(*prefix)
        self._wake.set()

    def remove(self, request: Request) -> None:
        """Forgets a request and gives back its blocks, after the current step if that computes it."""
        self.scheduler.remove(request)
        if all(chunk.request is not request for chunk in self._in_flight):
            self._free(request)

    def wake(self) -> None:
        """Blocks became free elsewhere: plan again."""
        self._wake.set()

    async def run(self) -> None:
        """Steps until cancelled. Raises EngineBroken."""
        while True:
            chunks = self._plan()
            if chunks:
                await self._step(chunks)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _plan(self) -> tuple[Chunk, ...]:
        """Admits what fits, then shares out the next step's tokens.

        A prompt is looked up in the cache when it is admitted, and again before its first chunk, since it may have
        waited while another computed the same.
        """
        lent = self._listener.lent_blocks()
        looked_up: list[Request] = []
        while (admitted := self.scheduler.admit(self._cache.num_available, lent, self._num_held)) is not None:
            self._take_blocks(admitted)
            looked_up.append(admitted)
        while True:
            chunks = self.scheduler.chunks()
            others = [c.request for c in chunks if c.request.started_s is None and c.request not in looked_up]
            looked_up += others
            found = [each for each in others if each.spec.reads_cache and each.group.attach_more(self._cache)]
            if not found:
                return chunks

    def _take_blocks(self, request: Request) -> None:
        """INVARIANT: what it does not share with others fits into the available blocks, cached ones that it finds among
        them, so that the rest can be allocated.
        """
        prefix = request.group.prefix
        known = self._cache.acquire(request.spec.cache_salt, self._tokens_to_find(request))
        prefix.reuse(known, self._pool.block_size)
        prefix.add_blocks(self._cache.allocate(self.scheduler.num_blocks(request)))

    def _num_held(self, request: Request) -> int:
        return self._cache.num_held(request.spec.cache_salt, self._tokens_to_find(request))

    @staticmethod
    def _tokens_to_find(request: Request) -> Sequence[TokenId]:
        return request.group.prefix.token_ids if request.spec.reads_cache else ()

    async def _step(self, chunks: tuple[Chunk, ...]) -> None:
        self._note_started(chunks)
        result: StepResult | None = None
        failure = StepFailed("the step was given up")
        self._in_flight, moves = chunks, self._cache.take_moves()
        try:
            step = Step(tuple(chunk.request.group.prefix.schedule(chunk.num_tokens) for chunk in chunks), moves=moves)
            result = await to_the_end(self._engine.launch(step))
            specs = tuple(chunk.request.spec for chunk in chunks)
            self.rate.add(self.num_tokens_in_flight, result.seconds)
            self.num_computed_tokens += self.num_tokens_in_flight
            self._observer.step(StepReport(result.seconds, self.num_tokens_in_flight, 0, specs))
        except Exception as error:  # noqa: BLE001 - whatever broke ends these requests; the worker only if no step works
            _log.exception("a step failed", num_seqs=len(chunks))
            failure = StepFailed.of(error)
        finally:
            seconds, num_tokens = 0.0 if result is None else result.seconds, self.num_tokens_in_flight
            self._cache.step_ended(failed=result is None, seconds=seconds, num_prompt_tokens=num_tokens)
            self._in_flight = ()  # the step has ended, however the wait did
        for number, chunk in enumerate(chunks):
            if result is None:
                self._give_up(chunk.request, failure)
            else:
                self._settle(chunk, result.outputs[number], result.scored.get(number))
        self._listener.step_ended()
        if isinstance(failure, EngineBroken):
            raise failure

    def _note_started(self, chunks: tuple[Chunk, ...]) -> None:
        now_s = self._clock.now_s()
        for chunk in chunks:
            if chunk.request.started_s is None:
                request, prefix = chunk.request, chunk.request.group.prefix
                request.started_s = now_s
                if request.spec.reads_cache:
                    request.observer.looked_up(prefix.num_tokens, prefix.num_cached_tokens)
                request.observer.started()
                self._listener.prompt_started(request)
                if prefix.num_cached_tokens:
                    self._listener.chunk_computed(request)

    def _settle(self, chunk: Chunk, sampled: tuple[Sampled, ...], scores: Scores | None) -> None:
        request = chunk.request
        drawn = tuple(each for each in sampled if not isinstance(each, BrokenLogits))
        if len(drawn) < len(sampled) or isinstance(scores, BrokenLogits):
            # The KV of earlier chunks may be what broke them.
            self._cache.forget(request.spec.cache_salt, request.group.prefix.token_ids)
            self._give_up(request, BrokenLogits().error(request.spec.request_id))
            return
        self._remember(chunk)
        if request not in self.scheduler:  # removed while the step ran
            self._free(request)
            return
        if scores is not None:
            request.take_scores(scores)
        if not chunk.is_last:
            self._listener.chunk_computed(request)
        else:
            self._listener.prompt_computed(request, drawn)
            self.remove(request)

    def _remember(self, chunk: Chunk) -> None:
        """The full blocks of what was computed are known from now on."""
        prefix = chunk.request.group.prefix
        end = prefix.num_computed_tokens
        self._cache.insert(
            chunk.request.spec.cache_salt, prefix.token_ids, prefix.block_table[: end // self._cache.pool.block_size]
        )

    def _give_up(self, request: Request, error: StepFailed) -> None:
        if request not in self.scheduler:  # removed while the step ran
            self._free(request)
            return
        self.remove(request)
        self._listener.request_failed(request, error)

    def _free(self, request: Request) -> None:
        blocks = request.group.prefix.take_blocks()
        if blocks:
            self._pool.release(blocks)
            self._wake.set()
