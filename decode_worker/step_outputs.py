"""What a step brought, applied: each token to its choice, and to the router that asked for it.

    prompt computed ─▶ prefill_done, first tokens of all choices ─▶ fork
    decode          ─▶ one token of one choice
    last token      ─▶ the choice's blocks are released; with the last choice, the request ends

What a step brought for a request that is gone, or a choice that has ended, is discarded.
"""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.running_batch import BatchedStep, RunningBatch
from engine.block_pool import BlockPool
from engine.sequence import Sequence
from engine.step import BrokenLogits, Sampled, StepResult
from tandem.clock import Clock
from tandem.errors import TandemError
from worker.request import Request


class StepOutputs:
    """Calls `on_ended` once per request that finished (None) or failed; it must make it leave the batch."""

    def __init__(
        self,
        batch: RunningBatch,
        pool: BlockPool,
        clock: Clock,
        on_ended: Callable[[Request, TandemError | None], None],
    ) -> None:
        self._batch = batch
        self._pool = pool
        self._clock = clock
        self._on_ended = on_ended

    def apply(self, batched: BatchedStep, result: StepResult) -> None:
        """The step has ended well."""
        for (request, sequence), drawn in zip(batched.seqs, result.outputs, strict=True):
            if request in self._batch and not sequence.is_finished:
                self._apply_seq(request, sequence, drawn)

    def fail(self, batched: BatchedStep, error: TandemError) -> None:
        """The step has ended badly."""
        for request, _ in batched.seqs:
            if request in self._batch:
                self._on_ended(request, error)

    def _apply_seq(self, request: Request, sequence: Sequence, drawn: tuple[Sampled, ...]) -> None:
        if any(isinstance(sampled, BrokenLogits) for sampled in drawn):
            self._on_ended(request, BrokenLogits().error(request.spec.request_id))
            return
        group = request.group
        ends_prefix = not group.is_forked and (bool(drawn) or sequence.num_remaining_tokens == 0)
        if ends_prefix and request.owes_prefill_done:
            request.owes_prefill_done = False
            request.prompt_computed(self._clock.now_s())
        if drawn:
            for choice, sampled in zip(sequence.drawers, drawn, strict=True):
                assert not isinstance(sampled, BrokenLogits)
                request.take_token(choice, sampled[0])
        if ends_prefix:
            group.fork(self._pool)
        if group.is_finished:
            self._on_ended(request, None)
        elif sequence.is_finished:
            self._batch.releases.release([sequence.take_blocks()])
