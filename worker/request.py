"""One request on a worker: who asked, what was asked, how far it is. The same for both roles.

It stays with the request through all its stages here; the stage is the room that holds it.
"""

from __future__ import annotations

from typing import TypeAlias

from engine.group import Group
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
    ) -> None:
        """`number` counts up with each arrival; `observer` is told of each thing where it happens."""
        self.router = router
        self.handle = handle
        self.spec = spec
        self.group = Group(spec)
        self.rank: Rank = (-spec.priority, number)
        self.arrived_s = arrived_s
        self.deadline = deadline
        self.observer = observer
        self.started_s: float | None = None
        """When its first tokens were scheduled; None before."""
        self.num_sampled_tokens = 0
        """Tokens drawn here, of all choices."""
