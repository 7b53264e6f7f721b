"""One request on a worker: who asked, what was asked, how far it is. The same object in all stages and roles."""

from __future__ import annotations

from typing import TypeAlias

from engine.beam_group import BeamGroup, new_group
from engine.sequence import Sequence
from engine.step import SampledToken
from shell.clock import Deadline
from shell.telemetry.events import FirstToken, SequenceEvents
from tandem.errors import InternalError
from tandem.types import FinishReason, GroupSpec, Handle, TokenLogprobs
from worker.ports import RouterPort

Rank: TypeAlias = tuple[int, int]
"""Smaller goes first: `(-priority, arrival number)`; no two are equal."""


class Request:
    """Compared by identity."""

    def __init__(
        self,
        router: RouterPort,
        handle: Handle,
        spec: GroupSpec,
        number: int,
        arrived_s: float,
        deadline: Deadline,
        events: SequenceEvents,
        destination: str | None = None,
    ) -> None:
        """`number` counts up with each arrival; `events` carries what happens to the request.

        `destination` names the worker to which this one hands it once its prompt is computed; None = it stays here.
        """
        self.router = router
        self.handle = handle
        self.spec = spec
        self.group = new_group(spec)
        self.rank: Rank = (-spec.priority, number)
        self.arrived_s = arrived_s
        self.deadline = deadline
        self.events = events
        self.destination = destination
        self.started_s: float | None = None
        """When the first tokens were scheduled; None before."""
        self.owes_prefill_done = True
        """Whether the prompt is computed here, and the router has still to learn that this has ended."""
        self.has_ended = False
        """Whether the request has ended: nothing more is said about this request."""
        self.max_local_tokens: int | None = None
        """Most tokens that a worker which computes the prompt itself may have to compute; None = any number."""
        self.came_after_tokens = 0
        """Prompt tokens that the worker had computed when the request came: its age, as `turn_of` counts it."""
        self.num_sampled_tokens = 0
        """Tokens drawn here, of all choices."""
        self.num_overtaken = 0
        """Requests that came later and got room before this request (`worker.admission`)."""

    @property
    def for_another(self) -> bool:
        """Returns whether the prompt is computed here for another worker."""
        return self.destination is not None

    @property
    def reads_cache(self) -> bool:
        """Returns whether KV that a cache knows may stand for tokens that are still to be computed."""
        return not self.owes_prefill_done or self.spec.sampling.prompt_logprobs is None

    @property
    def cached_tokens(self) -> int:
        """Returns the prompt tokens whose KV was found here; output that a resumed request brings is not counted."""
        return min(self.group.prefix.num_cached_tokens, self.spec.num_prompt_tokens)

    def prompt_computed(self, now_s: float) -> None:
        """Emits the prompt as computed and reports it to the router; called once, before the first tokens."""
        started_s = now_s if self.started_s is None else self.started_s
        self.events.emit(FirstToken())
        self.router.prefill_done(self.handle, started_s - self.arrived_s, now_s - started_s, self.cached_tokens)

    def take_scores(self, scores: tuple[TokenLogprobs, ...]) -> None:
        """Sends the router log-probabilities of the next tokens of the prompt."""
        told = self.group.prompt_scores
        if told is None:
            raise InternalError("log-probabilities of a prompt that nobody asked for")
        self.router.prompt_logprobs(self.handle, told.take(len(scores)), scores)

    def tell_found(self, search: BeamGroup) -> None:
        """Sends the router every choice whole, as the search has found them, best first."""
        for index in [choice.index for choice in self.spec.choices]:
            found = search.best(index)
            last = len(found.tokens) - 1
            for offset, token in enumerate(found.tokens):
                sampled = SampledToken(token.token_id, None if self.spec.sampling.logprobs is None else token)
                reason = found.finish_reason if offset == last else None
                self.router.token(self.handle, index, offset, sampled, reason, found.score)
            self.num_sampled_tokens += len(found.tokens)

    def take_token(self, choice: Sequence, token: SampledToken) -> FinishReason | None:
        """Adds a drawn token to a choice and sends it to the router, with the finish reason if it is the last."""
        offset = choice.num_output_tokens
        finish_reason = choice.append_token(token.token_id)
        self.num_sampled_tokens += 1
        self.router.token(self.handle, choice.index, offset, token, finish_reason)
        return finish_reason
