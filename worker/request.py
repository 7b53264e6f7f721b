"""One request on a worker: who asked, what was asked, how far it is. The same for both roles.

It stays with the request through all its stages here; its stage is told by who holds it.
"""

from __future__ import annotations

from typing import TypeAlias

from engine.group import Group
from engine.sequence import Sequence
from engine.step import SampledToken
from tandem.clock import Deadline
from tandem.telemetry.observers import SequenceObserver
from tandem.types import GroupSpec, Handle
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
        observer: SequenceObserver,
        destination: str = "",
    ) -> None:
        """`number` counts up with each arrival; `observer` is told of each thing where it happens.

        `destination` names the decode worker that a prefill worker hands it to.
        """
        self.router = router
        self.handle = handle
        self.spec = spec
        self.group = Group(spec)
        self.rank: Rank = (-spec.priority, number)
        self.arrived_s = arrived_s
        self.deadline = deadline
        self.observer = observer
        self.destination = destination
        self.started_s: float | None = None
        """When its first tokens were scheduled; None before."""
        self.owes_prefill_done = True
        """Whether the prompt is computed here, and the router has not been told that it is done."""
        self.num_sampled_tokens = 0
        """Tokens drawn here, of all choices."""

    def prompt_computed(self, now_s: float) -> None:
        """Tells router and observer, before the first tokens; once, by the worker that computed it."""
        started_s = now_s if self.started_s is None else self.started_s
        self.observer.first_token()
        self.router.prefill_done(self.handle, started_s - self.arrived_s, now_s - started_s)

    def take_token(self, choice: Sequence, token: SampledToken) -> None:
        """Adds a drawn token to a choice and tells it to the router, with the finish reason if it is the last."""
        offset = choice.num_output_tokens
        finish_reason = choice.append_token(token.token_id)
        self.num_sampled_tokens += 1
        self.router.token(self.handle, choice.index, offset, token, finish_reason)
