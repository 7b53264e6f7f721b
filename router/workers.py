"""The workers as requests see them: a pair for a request, a link to each, readiness.

Keeps one link per registered worker and tells whoever waits that something changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from router.placement import Demand, Placement, common_sequence, longest_sequence, place, readiness
from router.registry import Registry
from router.worker_link import WorkerLink
from tandem.errors import Unavailable
from tandem.security.credentials import Outgoing
from tandem.telemetry.logging import get_logger
from tandem.types import Incarnation, WorkerInfo

_log = get_logger(__name__)

_PLAIN = Outgoing()


class Workers:
    """A WorkerListener. Use as an async context manager: leaving it ends all links."""

    def __init__(self, registry: Registry, router: Incarnation, rng: Random, outgoing: Outgoing = _PLAIN) -> None:
        self._outgoing = outgoing
        self._registry = registry
        self._router = router
        self._rng = rng
        self._links: dict[Incarnation, WorkerLink] = {}
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        registry.subscribe(self)

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *_: object) -> None:
        for incarnation in list(self._tasks):
            self._end_link(incarnation)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def link(self, info: WorkerInfo) -> WorkerLink | None:
        """The stream to this life of a worker; None if it is gone."""
        return self._links.get(info.incarnation)

    def engine_steps(self, info: WorkerInfo) -> int | None:
        """Steps that its engine has made, as last heard; None if it is gone or was never heard."""
        load = self._registry.load(info)
        return None if load is None else load.engine_steps

    def readiness(self) -> str | None:
        """None if a request could be served now, else what is missing."""
        return readiness(self._registry.views())

    def longest_sequence(self, num_prompt_tokens: int, num_choices: int) -> int | None:
        """See `placement.longest_sequence`; None without a decode worker."""
        return longest_sequence(self._registry.views(), num_prompt_tokens, num_choices)

    def common_sequence(self, num_prompt_tokens: int, num_choices: int) -> int | None:
        """See `placement.common_sequence`; None without a pair that takes such a prompt now."""
        return common_sequence(self._registry.views(), num_prompt_tokens, num_choices)

    async def place(self, demand: Demand, wait_s: float) -> Placement:
        """A pair for `demand`, waiting at most `wait_s` for one to come. Raises Unavailable."""
        try:
            async with asyncio.timeout(wait_s):
                return await self._place_when_possible(demand)
        except TimeoutError:
            return self.place_now(demand)

    def place_now(self, demand: Demand) -> Placement:
        """A pair for `demand`, counted as its workers' load. Raises Unavailable."""
        placement = place(demand, self._registry.views(), self._rng)
        if placement.prefill is not None:
            self._registry.assign(placement.prefill, demand.num_tokens)
        self._registry.assign(placement.decode, demand.num_tokens)
        return placement

    async def wait_for_change(self, at_most_s: float) -> None:
        """Returns when anything about any worker changed, or when the time is up."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def worker_added(self, info: WorkerInfo) -> None:
        """Opens a link to it."""
        _log.info("worker joined", worker_id=info.worker_id, role=info.role, address=info.address)
        link = WorkerLink(info, self._router, self._connection_watch(info), self._outgoing)
        self._links[info.incarnation] = link
        self._tasks[info.incarnation] = asyncio.create_task(link.run(), name=f"link to {info.worker_id}")
        self._notify()

    def worker_lost(self, info: WorkerInfo, why: str) -> None:
        """Ends the link; its sequences are told."""
        _log.warning("worker lost", worker_id=info.worker_id, role=info.role, why=why)
        self._end_link(info.incarnation)
        self._notify()

    def worker_changed(self, info: WorkerInfo) -> None:
        """Wakes whoever waits for a change."""
        self._notify()

    async def _place_when_possible(self, demand: Demand) -> Placement:
        while True:
            changed = self._changed
            try:
                return self.place_now(demand)
            except Unavailable:
                await changed.wait()

    def _connection_watch(self, info: WorkerInfo) -> Callable[[bool], None]:
        return lambda connected: self._registry.set_connected(info, connected=connected)

    def _end_link(self, incarnation: Incarnation) -> None:
        self._links.pop(incarnation, None)
        task = self._tasks.pop(incarnation, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _notify(self) -> None:
        """Sets the event of those who wait now; whoever comes later waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
