"""One process is killed under load, as in Dynamo's fault tolerance tests: `python -m bench.soak --kind kill`.

As there: 8 clients send 800 requests of 100 + 100 tokens and 30 s at most, one after the other each. When a quarter of
the requests has ended, one process gets SIGKILL. A client pauses for a second after a request that failed. Here on the
demo model, every second request is sampled with a seed, and the tokens of each answer, of failed ones too as far as
they came, are compared with those of a quiet run.

    failed, in flight   sent before the kill. Which of two routers had a call, no client sees: all of them count
    failed, later       sent after the kill
    wrong               an answer, or the part of it that came, has other tokens than in the quiet run
    service back        from the kill to the end of the first request that was sent after it and succeeded, on whatever
                        was left or came back
    recovery            of a worker: from the kill to the end of the first request that succeeded after the worker's
                        successor (same name, another life) was seen to have computed a step. The router's status
                        is asked every 20 ms and workers report every 250 ms: never told too short.
                        Of a router: the same as `service back`

Routers are killed three times: a single one whose clients do what `tandem.client` offers after a failure, `wait_ready`;
a single one whose clients do what Dynamo's do, so that each fails about once a second until it is back; one of two.

Bars: no request fails when a worker is killed; when a router is killed, none that was sent later; recovery within 3 s;
no wrong token. Of the clients that only pause, the number that fail has no bar.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import uvloop

from bench.support.cluster import eventually, serve
from bench.support.fleet import Fleet
from bench.support.ports import free_ports
from bench.support.processes import children
from bench.support.witness import Sighting, Witness, random_questions
from shell.clock import Clock, MonotonicClock
from tandem.client import AsyncClient, Client
from tandem.errors import TandemError
from tandem.types import Role

CLIENTS = 8
REQUESTS_EACH = 100
NUM_QUESTIONS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 100, 100
REQUEST_TIMEOUT_S = 30.0
KILLED_AFTER = 1 / 4
"""Share of all requests that have ended by then."""
RECOVERY_BAR_S = 3.0
_READY_TIMEOUT_S = 60.0
_WATCHED_S = 60.0
"""So long after the kill a worker's successor is looked for."""
_POLL_S = 0.02
_UNCACHED = "--no-prefix-cache"
"""Questions come again: what a cache knew would not be computed by a worker that was started again."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster, and who is killed in it."""

    prefill: int
    decode: int
    victim: str
    """`prefill-0`, `decode-0`, `router` of `tandem serve`, which restarts it; `router-0` of two, which stays away."""
    clients_wait: bool = False
    """After a failure, for SERVING; else they pause."""

    @property
    def fleet(self) -> str:
        """In Dynamo's words."""
        return f"{self.prefill}P{self.decode}D"

    @property
    def kills_worker(self) -> bool:
        """Else a router."""
        return not self.victim.startswith("router")

    @property
    def title(self) -> str:
        """What is killed, for people."""
        if self.victim == "router":
            return f"router, clients {'wait for SERVING' if self.clients_wait else 'pause'}"
        return "one of two routers" if self.victim == "router-0" else f"{self.victim.partition('-')[0]} worker"


CASES = tuple(
    case
    for size in (1, 2)
    for case in (
        Case(size, size, "decode-0"),
        Case(size, size, "prefill-0"),
        Case(size, size, "router", clients_wait=True),
        Case(size, size, "router"),
        Case(size, size, "router-0", clients_wait=True),
    )
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients saw of one kill."""

    fleet: str
    killed: str
    victim: str
    requests: int
    failed_in_flight: int
    failed_later: int
    wrong: int
    service_back_s: float | None
    """None: never while the load lasted, here and below."""
    recovery_s: float | None
    reasons: Mapping[str, int]
    """How often requests failed with each."""
    missed: tuple[str, ...]
    """The bars that were missed, in words."""


def outcome_of(case: Case, calls: Sequence[Sighting], killed_s: float, recovered_s: float | None) -> Outcome:
    """Counts. `recovered_s` is when the successor was seen to compute; None = never, or no worker was killed."""
    wrong = sum(call.is_wrong for call in calls)
    failed = [call for call in calls if call.error and not call.is_wrong]
    later = sum(call.sent_s > killed_s for call in failed)
    service_back_s = _first_end(killed_s, [call for call in calls if call.sent_s > killed_s])
    recovery_s = service_back_s
    if case.kills_worker:
        after = [] if recovered_s is None else [call for call in calls if call.ended_s > recovered_s]
        recovery_s = _first_end(killed_s, after)
    missed = []
    if wrong:
        missed.append(f"{wrong} wrong answers")
    if case.kills_worker and failed:
        missed.append(f"{len(failed)} requests failed")
    if (case.kills_worker or case.clients_wait) and later:
        missed.append(f"{later} requests failed that were sent after the kill")
    if recovery_s is None or recovery_s > RECOVERY_BAR_S:
        missed.append("no recovery" if recovery_s is None else f"recovery took {recovery_s:.1f} s")
    return Outcome(
        case.fleet,
        case.title,
        case.victim,
        len(calls),
        len(failed) - later,
        later,
        wrong,
        service_back_s,
        recovery_s,
        dict(Counter(call.error.partition(":")[0] for call in failed)),
        tuple(missed),
    )


def _first_end(killed_s: float, calls: Sequence[Sighting]) -> float | None:
    """Seconds from the kill to the end of the first of these that succeeded."""
    return min((call.ended_s - killed_s for call in calls if not call.error), default=None)


@contextlib.contextmanager
def running(case: Case) -> Iterator[tuple[str, int]]:
    """The case's cluster with all its workers: what clients call, and the victim's process id."""
    if case.victim != "router-0":
        with serve("demo", "--prefill", str(case.prefill), "--decode", str(case.decode), _UNCACHED) as cluster:
            _wait_whole(cluster.target, case.prefill + case.decode)
            yield cluster.target, children(cluster.process.pid)[case.victim]
        return
    with Fleet(free_ports(2), options=(_UNCACHED,)) as fleet:
        for index in range(2):
            fleet.start_router(index)
        for role, count in ((Role.PREFILL, case.prefill), (Role.DECODE, case.decode)):
            for index in range(count):
                fleet.start_worker(role, f"{role.value}-{index}")
        yield fleet.target, fleet.process(case.victim).pid


def _wait_whole(target: str, num_workers: int) -> None:
    """Returns once so many workers serve. Raises RuntimeError if they do not in time."""
    with Client(target) as client:
        client.wait_ready(_READY_TIMEOUT_S)
        if not eventually(lambda: sum(each.state == "serving" for each in client.status().workers) == num_workers, 30):
            raise RuntimeError(f"{client.status()}: not all of {num_workers} workers serve")


async def see_recovery(client: AsyncClient, worker: str, killed_pid: int, clock: Clock) -> float | None:
    """When another process of this name was seen to have computed something since it was first seen; None = never."""
    first_steps: int | None = None
    end_s = clock.now_s() + _WATCHED_S
    while clock.now_s() < end_s:
        with contextlib.suppress(TandemError):
            for each in (await client.status()).workers:
                if each.info.worker_id == worker and each.info.pid != killed_pid and each.connected:
                    first_steps = each.load.engine_steps if first_steps is None else first_steps
                    if each.load.engine_steps > first_steps:
                        return clock.now_s()
        await asyncio.sleep(_POLL_S)
    return None


async def _load_and_kill(case: Case, target: str, pid: int, clients: int, requests: int) -> Outcome:
    questions = random_questions(NUM_QUESTIONS, PROMPT_TOKENS, OUTPUT_TOKENS)
    patience = {"waits_until_ready": case.clients_wait, "timeout_s": REQUEST_TIMEOUT_S}
    witness = Witness(target, clients, questions, **patience)  # type: ignore[arg-type]
    clock = MonotonicClock()
    async with AsyncClient(target) as operator, asyncio.TaskGroup() as tasks:
        async with witness.watching():
            before = round(requests * KILLED_AFTER)
            await witness.see(before)
            killed_s = clock.now_s()
            os.kill(pid, signal.SIGKILL)
            watch = tasks.create_task(see_recovery(operator, case.victim, pid, clock)) if case.kills_worker else None
            await witness.see(requests - before)
        if watch is not None and not watch.done():
            watch.cancel()
    recovered_s = watch.result() if watch is not None and not watch.cancelled() else None
    return outcome_of(case, witness.sightings, killed_s, recovered_s)


def run_case(case: Case, clients: int = CLIENTS, requests_each: int = REQUESTS_EACH) -> Outcome:
    """One kill, on a cluster of its own."""
    with running(case) as (target, pid), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_load_and_kill(case, target, pid, clients, clients * requests_each))
