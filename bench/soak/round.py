"""One round of a soak: a storm over one cluster, and the looks at it before and after.

whole → answers right → at rest, looked at → storm → whole → answers right → at rest, looked at again

In the storm an answer may be any model's. At rest all workers have the weights that lie in the model's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from bench.soak.calls import (
    MODEL_CHANGED,
    NOT_COUNTED,
    OVERRUN_S,
    WANTS_ANSWER,
    Ended,
    Kind,
    Manner,
    call,
    draw_manner,
)
from bench.soak.changes import Changes
from bench.soak.faults import Faults
from bench.soak.model import SoakModel
from bench.support.cluster import Cluster, becomes_idle
from bench.support.processes import Usage, children, usage
from bench.support.resetting_proxy import ResettingProxy
from shell.clock import MonotonicClock
from tandem.client import AsyncClient, Client
from tandem.errors import TandemError

CALLERS = 12
_PROXIES = 4
_WHOLE_WITHIN_S = 60.0
_IDLE_WITHIN_S = 20.0
_POLL_S = 0.25
_STATUS_TIMEOUT_S = 2.0
_AFTER_TROUBLE_S = 3.0
"""So long after the router was killed or frozen, what it holds is not held against it."""
_SAMPLE = 24
"""Kinds that are asked, all at once, before and after the faults."""
_BACK_OFF_S = (0.1, 0.5)
"""Of a caller whose call failed, before it waits for SERVING."""
_READY_TIMEOUT_S = 10.0
MORE_DESCRIPTORS = 6
MORE_THREADS = 4
MORE_MAPPINGS = 2
MORE_RSS_BYTES = 32 * 1024 * 1024
"""Slack of one process: pools and caches may grow so much in a round. In a long one a leak per request is far more."""
LINK_DESCRIPTORS = 12
LINK_THREADS = 1
LINK_MAPPINGS = 1
"""What one link to another worker holds at most: over nixl 11 descriptors, over shm a mapping."""


@dataclass(frozen=True, slots=True)
class Account:
    """What one round came to."""

    title: str
    seconds: float
    faults: Mapping[str, int]
    calls: Mapping[str, Mapping[str, int]]
    """By manner, then outcome."""
    most_late_s: float
    """How late this process itself was, at worst: calls look late by as much."""
    violations: tuple[str, ...]
    """Each begins with its sort and a colon."""
    checked: int = 0
    """Calls that heard tokens, all of which were compared."""

    @property
    def stayed(self) -> int:
        """Calls that wanted an answer and had time for it, whose connection stayed, and that were not sent again."""
        gone = (self.calls.get(manner, {}).get(each, 0) for manner in WANTS_ANSWER for each in NOT_COUNTED)
        return self.wanted - sum(gone)

    @property
    def wanted(self) -> int:
        """Calls that wanted an answer and had time for it."""
        return sum(sum(self.calls.get(manner, {}).values()) for manner in WANTS_ANSWER)

    @property
    def served(self) -> int:
        """Those of them that got it."""
        return sum(self.calls.get(manner, {}).get("ok", 0) for manner in WANTS_ANSWER)


class Lately:
    """Counts calls that run or ended within the last second."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self._running = 0
        self._ends_s: list[float] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A call runs while inside."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ends_s.append(self._clock.now_s())

    def count(self) -> int:
        """As of now."""
        since_s = self._clock.now_s() - OVERRUN_S
        self._ends_s = [end_s for end_s in self._ends_s if end_s > since_s]
        return self._running + len(self._ends_s)


class Round:
    """Makes the account of one cluster. Use once."""

    def __init__(
        self,
        title: str,
        cluster: Cluster,
        workers_each: int,
        kinds: Sequence[Kind],
        model: SoakModel,
        rng: Random,
        *,
        guest_options: Sequence[str] = (),
        later_links: int = 0,
    ) -> None:
        """`guest_options`: of workers that come and go.

        `later_links`: so many links a worker may open after the first look, since placement decides when.
        """
        self._title = title
        self._cluster = cluster
        self._workers_each = workers_each
        self._later_links = later_links
        self._kinds = kinds
        self._model = model
        self._guest_options = guest_options
        self._rng = rng
        self._clock = MonotonicClock()
        self._begin_s = self._clock.now_s()
        self._ended: list[Ended] = []
        self._violations: list[str] = []
        self._faults: Counter[str] = Counter()
        self._lately = Lately()
        self._most_late_s = 0.0
        self._probing_rng = Random(0)
        """Apart: how many calls the fleet needs to be whole again must not change what is drawn after."""

    async def run(self, seconds: float) -> Account:
        """The whole round; the storm takes so many seconds."""
        async with AsyncClient(self._cluster.target) as operator:
            await self._rests(operator, "before the faults")
            before = look(self._cluster)
            async with self._proxies() as proxies, self._clients(proxies) as clients:
                await self._storm(seconds, operator, proxies, clients)
            await self._rests(operator, "after the faults")
            self._check_leaks(before, look(self._cluster))
        by_manner = {
            manner.value: dict(Counter(each.outcome for each in self._ended if each.manner is manner))
            for manner in Manner
        }
        checked = sum(each.num_tokens > 0 for each in self._ended)
        violations = tuple(self._violations)
        return Account(self._title, seconds, dict(self._faults), by_manner, self._most_late_s, violations, checked)

    def say(self, what: str) -> None:
        """Prints it with the round's time."""
        print(f"  {self._clock.now_s() - self._begin_s:6.1f} s  {what}", flush=True)

    def _violated(self, what: str) -> None:
        self._violations.append(what)
        self.say(f"VIOLATION: {what}")

    async def _rests(self, operator: AsyncClient, when: str) -> None:
        """Whole, every answer right, then nothing held any more."""
        missing = await self._missing(operator)
        if missing:
            self._violated(f"not whole: {when} {missing} after {_WHOLE_WITHIN_S:g} s")
        else:
            await self._check_answers(operator, when)
        try:
            with Client(self._cluster.target) as client:
                if not await asyncio.to_thread(becomes_idle, client, _IDLE_WITHIN_S):
                    self._violated(f"leak: {when} not at rest: {client.status()}")
        except TandemError as error:
            self._violated(f"not whole: {when} no status: {error.message}")

    async def _check_answers(self, operator: AsyncClient, when: str) -> None:
        sample = self._rng.sample(self._kinds, min(_SAMPLE, len(self._kinds)))
        for ended in await asyncio.gather(
            *(call(operator, self._of_now(kind), Manner.PLAIN, self._rng, self._clock) for kind in sample)
        ):
            if ended.outcome != "ok" or ended.complaint:
                self._violated(f"not healed: {when} {ended.kind}: {ended.outcome} {ended.complaint}")

    async def _missing(self, operator: AsyncClient) -> str:
        """What is wrong with the fleet once it has had its time to come back; empty = all workers serve."""
        num_workers = 2 * self._workers_each
        end_s = self._clock.now_s() + _WHOLE_WITHIN_S
        while True:
            try:
                workers = (await operator.status(timeout_s=_STATUS_TIMEOUT_S)).workers
                states = {each.info.worker_id: each.state for each in workers}
                if list(states.values()) == ["serving"] * num_workers:
                    return ""
                why = f"{num_workers} workers should serve: {states}"
            except TandemError as error:
                why = f"no status: {error.message}"
            if self._clock.now_s() > end_s:
                return why
            await asyncio.sleep(_POLL_S)
            # Who was set aside last is probed by the next request, and no caller sends one any more.
            probe = await call(operator, self._uncached(), Manner.PLAIN, self._probing_rng, self._clock)
            if probe.complaint:
                self._violated(f"{probe.complaint} ({probe.kind}, {probe.manner})")

    def _of_now(self, kind: Kind) -> Kind:
        """The request with the one answer that is right at rest."""
        return Kind(kind.request, {self._model.weights: kind.answers[self._model.weights]})

    def _uncached(self) -> Kind:
        """One that no cache knows: it would go to who holds its prompt, never to the worker that is to be probed."""
        kind, salt = self._probing_rng.choice(self._kinds), f"probe {self._probing_rng.random()}"
        return Kind(replace(kind.request, options={**kind.request.options, "cache_salt": salt}), kind.answers)

    def _check_leaks(self, before: Mapping[str, Usage], after: Mapping[str, Usage]) -> None:
        for name, then, now in survivors(before, after):
            self.say(f"{name} (pid {now.pid}): {then} became {now}")
        for leak in leaks(before, after, self._later_links):
            self._violated(leak)

    @contextlib.asynccontextmanager
    async def _proxies(self) -> AsyncIterator[dict[str, ResettingProxy]]:
        """By address."""
        async with contextlib.AsyncExitStack() as stack:
            proxies = [ResettingProxy(self._cluster.target) for _ in range(_PROXIES)]
            yield {await stack.enter_async_context(each.listening()): each for each in proxies}

    @contextlib.asynccontextmanager
    async def _clients(self, addresses: Iterable[str]) -> AsyncIterator[list[AsyncClient]]:
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(AsyncClient(address)) for address in addresses]

    async def _storm(
        self,
        seconds: float,
        operator: AsyncClient,
        proxies: Mapping[str, ResettingProxy],
        clients: Sequence[AsyncClient],
    ) -> None:
        fault_rng = Random(self._rng.random())
        faults = Faults(
            self._cluster.process.pid, self._workers_each, operator, list(proxies.values()), fault_rng, self.say
        )
        changes = Changes(
            self._cluster.process.pid,
            self._cluster.target,
            self._model,
            self._guest_options,
            Random(self._rng.random()),
            self.say,
        )
        going = asyncio.Event()
        going.set()
        async with asyncio.TaskGroup() as watching:
            watchers = [
                watching.create_task(self._watch_router(operator, faults)),
                watching.create_task(self._watch_own_loop()),
            ]
            async with asyncio.TaskGroup() as calling:
                for index in range(CALLERS):
                    rng = Random(self._rng.random())
                    calling.create_task(self._call_on_and_on(clients[index % len(clients)], rng, going))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds), asyncio.TaskGroup() as storm:
                        storm.create_task(faults.run())
                        storm.create_task(changes.run())
                await changes.finish()
                going.clear()
            for watcher in watchers:
                watcher.cancel()
        self._faults = faults.counts + changes.counts
        for each in changes.violations:
            self._violated(each)

    async def _call_on_and_on(self, client: AsyncClient, rng: Random, going: asyncio.Event) -> None:
        kind, manner = rng.choice(self._kinds), draw_manner(rng)
        while going.is_set():
            with self._lately.one():
                ended = await call(client, kind, manner, rng, self._clock)
            self._ended.append(ended)
            if ended.complaint:
                self._violated(f"{ended.complaint} ({ended.kind}, {ended.manner})")
            if ended.outcome != MODEL_CHANGED:
                kind, manner = rng.choice(self._kinds), draw_manner(rng)
            if ended.outcome not in ("ok", "left"):
                await asyncio.sleep(rng.uniform(*_BACK_OFF_S))
                with contextlib.suppress(TandemError):  # the next call tells what is wrong
                    await client.wait_ready(_READY_TIMEOUT_S)

    async def _watch_router(self, operator: AsyncClient, faults: Faults) -> None:
        """It may hold no more requests than callers have. Seen from its side, for callers give up by themselves."""
        over_since_s: float | None = None
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                status = await operator.status(timeout_s=_STATUS_TIMEOUT_S)
            except TandemError:
                over_since_s = None
                continue
            held, lately = status.active_requests + status.queued_requests, self._lately.count()
            now_s = self._clock.now_s()
            if held <= lately or now_s - faults.router_troubled_s < _AFTER_TROUBLE_S:
                over_since_s = None
            elif over_since_s is None:
                over_since_s = now_s
            elif now_s - over_since_s > OVERRUN_S:
                self._violated(f"hang: the router holds {held} requests, of {lately} in the last second")
                over_since_s = None

    async def _watch_own_loop(self) -> None:
        while True:
            begin_s = self._clock.now_s()
            await asyncio.sleep(_POLL_S)
            self._most_late_s = max(self._most_late_s, self._clock.now_s() - begin_s - _POLL_S)


def look(cluster: Cluster) -> dict[str, Usage]:
    """Returns what `tandem serve` and each of its children holds, by name."""
    pids = {"serve": cluster.process.pid} | children(cluster.process.pid)
    return {name: found for name, pid in pids.items() if (found := usage(pid)) is not None}


def survivors(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> Iterator[tuple[str, Usage, Usage]]:
    """Each process that is the same one still, then and now."""
    for name, then in before.items():
        now = after.get(name)
        if now is not None and now.pid == then.pid:
            yield name, then, now


def leaks(before: Mapping[str, Usage], after: Mapping[str, Usage], later_links: int = 0) -> list[str]:
    """What a survivor has more of than its slack and so many new links allow."""
    found = []
    for name, then, now in survivors(before, after):
        for what, grown, slack in (
            ("descriptors", now.descriptors - then.descriptors, MORE_DESCRIPTORS + later_links * LINK_DESCRIPTORS),
            ("threads", now.threads - then.threads, MORE_THREADS + later_links * LINK_THREADS),
            (
                "shared mappings",
                now.shared_mappings - then.shared_mappings,
                MORE_MAPPINGS + later_links * LINK_MAPPINGS,
            ),
            ("bytes of memory", now.rss_bytes - then.rss_bytes, MORE_RSS_BYTES),
        ):
            if grown > slack:
                found.append(f"leak: {name} has {grown} more {what}: {then} became {now}")
    return found
