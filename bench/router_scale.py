"""What a router pays for having many workers: `python -m bench.router_scale`.

Placement and intake: event-loop time per request with so many workers, half of which prefill, without streams to them:
what `Entrance` asks before a request is placed, and placing it. Every worker holds a system prompt that all requests
share; some hold more of what this one begins with. Between requests, heartbeats take away what was assigned.

Heartbeats: CPU time of a router process per second, with the real RegistryService on one port and so many real
announcers in another process. `idle`: nothing changes at the workers; `busy`: at each look at the load something has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import uvloop

from bench.record import write_record
from bench.support.markdown import table
from bench.support.ports import free_ports
from router.faces.tandem.cluster import REGISTRY_SERVICE, RegistryServicer
from router.placement import Demand
from router.prefix_map import Prefix, PrefixMap
from router.room import common_sequence, longest_sequence
from router.workers import Workers
from shell.clock import MonotonicClock
from shell.config import RouterConfig
from shell.rpc.server import RpcServer, Service
from shell.telemetry.logging import configure_logging
from tandem.security.credentials import Outgoing
from tandem.types import Incarnation, PoolCounts, Role, TokenId, WorkerId, WorkerInfo, WorkerLoad
from tandem.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from worker.serving.announcer import Announcer

SIZES = (1, 64, 1000)
PROMPT_TOKENS, BLOCK_SIZE, SHARED_BLOCKS = 1024, 16, 16
LOAD = WorkerLoad(1, 0, 0, 0, PoolCounts(4096, 4096, 0, 0, 0, 0, BLOCK_SIZE, 0), 0, draining=False)
_WARM_UP_S = 3.0
_REGISTERED_S = 60.0


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Event-loop time of one request, milliseconds."""

    num_workers: int
    intake_p50_ms: float
    placement_p50_ms: float
    placement_p99_ms: float


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Of so many workers."""

    num_workers: int
    state: str
    per_s: float
    cpu_s_per_s: float
    """Of the router's process."""
    us_each: float


class Link:
    """A stream to a worker that stands and carries nothing."""

    def __init__(self, *_: object) -> None:
        self.connected = True
        self.held = PrefixMap()

    def close(self) -> None:
        """It needs none."""

    async def wait_closed(self) -> None:
        """It is closed."""


def worker_info(number: int, role: Role) -> WorkerInfo:
    """One of many that are alike."""
    return WorkerInfo(
        worker_id=WorkerId(f"w{number}"),
        incarnation=Incarnation(f"{number:032x}"),
        role=role,
        address=f"127.0.0.1:{1 + number}",
        model="m",
        config_fingerprint="c",
        model_fingerprint="f",
        layout_fingerprint="l",
        transports=("shm", "tcp"),
        local_prefill_tokens=0,
        max_sequence_tokens=4096,
        pid=1,
        device="cpu",
        pool_tokens=4096 * BLOCK_SIZE,
        max_seqs=64,
    )


def router_workers() -> Workers:
    """A router's, without streams."""
    link: Any = Link
    return Workers("m", "c", MonotonicClock(), RouterConfig().lease_s, 60.0, link, Random(1))


def pool_of(num_workers: int, prefix: Prefix, rng: Random) -> tuple[Workers, list[WorkerInfo]]:
    """Registered workers: all of them hold the first blocks of `prefix`, one in ten some more."""
    workers = router_workers()
    hashes = prefix.hashes(BLOCK_SIZE)
    infos = [worker_info(n, Role.DECODE if n % 2 else Role.PREFILL) for n in range(num_workers)]
    if num_workers == 1:
        infos = [replace(infos[0], role=Role.DECODE, local_prefill_tokens=None)]
    for info in infos:
        workers.heartbeat(info, LOAD)
        link = workers.link(info)
        assert link is not None
        num_held = rng.randint(SHARED_BLOCKS, len(hashes)) if rng.random() < 0.1 else SHARED_BLOCKS
        link.held.change(hashes[:num_held], [], cleared=True)
    return workers, infos


async def time_requests(num_workers: int, num_requests: int) -> PerRequest:
    """With so many workers."""
    prefix = Prefix("", tuple(map(TokenId, range(PROMPT_TOKENS))))
    await prefix.name_blocks(BLOCK_SIZE)
    workers, infos = pool_of(num_workers, prefix, Random(num_workers))
    demand = Demand(PROMPT_TOKENS, PROMPT_TOKENS + 64, PROMPT_TOKENS, prefix=prefix)
    intake_s, placement_s = [], []
    for number in range(num_requests):
        begin_s = time.perf_counter()
        seen = workers.candidates()
        longest = longest_sequence(seen, PROMPT_TOKENS)
        usual = common_sequence(seen, PROMPT_TOKENS)
        longest_sequence(seen, PROMPT_TOKENS)
        assert longest
        assert usual
        middle_s = time.perf_counter()
        assignment = await workers.place(demand, 0.0)
        end_s = time.perf_counter()
        workers.end(assignment, arrived=assignment.placement.prefill is None)
        intake_s.append(middle_s - begin_s)
        placement_s.append(end_s - middle_s)
        workers.heartbeat(infos[number % len(infos)], LOAD)
    p99_s = statistics.quantiles(placement_s, n=100)[98] if num_requests > 1 else placement_s[0]
    return PerRequest(
        num_workers, 1000 * statistics.median(intake_s), 1000 * statistics.median(placement_s), 1000 * p99_s
    )


async def time_heartbeats(num_workers: int, state: str, seconds: float) -> Heartbeats:
    """With a process of so many announcers."""
    workers, (port,) = router_workers(), free_ports(1)
    servicer = RegistryServicer(workers, Outgoing())
    service = Service(
        REGISTRY_SERVICE, lambda server: add_RegistryServiceServicer_to_server(servicer, server), long_lived=True
    )
    server = RpcServer(f"127.0.0.1:{port}", [service])
    await server.start()
    num_heard = 0
    take: Callable[..., None] = workers.heartbeat

    def heartbeat(*args: Any) -> None:
        nonlocal num_heard
        num_heard += 1
        take(*args)

    workers.heartbeat = heartbeat  # type: ignore[assignment, method-assign]
    watch = asyncio.create_task(_watch(workers))
    child = multiprocessing.get_context("spawn").Process(target=_announce, args=(port, num_workers, state), daemon=True)
    child.start()
    try:
        async with asyncio.timeout(_REGISTERED_S):
            while len(workers.views()) < num_workers:
                await workers.wait_for_change(1.0)
        await asyncio.sleep(_WARM_UP_S)
        before, cpu_s, begin_s = num_heard, time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        passed_s = time.perf_counter() - begin_s
        cpu_s, number = time.process_time() - cpu_s, num_heard - before
    finally:
        child.kill()
        watch.cancel()
        await server.drain(0)
    return Heartbeats(num_workers, state, number / passed_s, cpu_s / passed_s, 1e6 * cpu_s / max(1, number))


async def _watch(workers: Workers) -> None:
    """As a router's status does it."""
    while True:
        workers.tick()
        workers.readiness()
        await workers.wait_for_change(workers.tick_s)


def _announce(port: int, num_workers: int, state: str) -> None:
    """A process of many workers, without the workers."""
    configure_logging("worker", "text", "error")
    changing = iter(_loads())

    async def main() -> None:
        load = (lambda: next(changing)) if state == "busy" else (lambda: LOAD)
        infos = [worker_info(n, Role.DECODE if n % 2 else Role.PREFILL) for n in range(num_workers)]
        announcers = [Announcer((f"127.0.0.1:{port}",), info, load, lambda: None) for info in infos]
        async with asyncio.TaskGroup() as tasks:
            for each in announcers:
                tasks.create_task(each.run())
                await asyncio.sleep(0.002)

    uvloop.run(main())


def _loads() -> Iterator[WorkerLoad]:
    number = 0
    while True:
        number += 1
        pool = replace(LOAD.pool, free=4096 - number % 4000, live=number % 4000)
        yield replace(LOAD, engine_steps=number, running_seqs=number % 60, pool=pool)


async def measure(sizes: tuple[int, ...], num_requests: int, seconds: float) -> dict[str, Any]:
    """All figures."""
    requests = [await time_requests(size, num_requests) for size in sizes]
    largest = max(sizes)
    beats = [await time_heartbeats(largest, state, seconds) for state in ("idle", "busy")] if seconds else []
    return {"requests": [asdict(each) for each in requests], "heartbeats": [asdict(each) for each in beats]}


def render(record: dict[str, Any]) -> str:
    """For people."""
    rows = [
        (
            f"{each['num_workers']:,}",
            *(f"{each[name]:.3g}" for name in ("intake_p50_ms", "placement_p50_ms", "placement_p99_ms")),
        )
        for each in record["requests"]
    ]
    beats = [
        (
            f"{each['num_workers']:,}",
            each["state"],
            f"{each['per_s']:.0f}",
            f"{each['cpu_s_per_s']:.2f}",
            f"{each['us_each']:.0f}",
        )
        for each in record["heartbeats"]
    ]
    parts = [table(("workers", "intake p50, ms", "placement p50, ms", "p99, ms"), rows)]
    if beats:
        parts.append(table(("workers", "state", "heartbeats/s", "router CPU s/s", "µs each"), beats))
    return "\n".join(parts)


def main() -> int:
    """Measures, prints, records."""
    parser = argparse.ArgumentParser(prog="python -m bench.router_scale", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of workers")
    parser.add_argument("--requests", type=int, default=300, help="requests timed at each number")
    parser.add_argument("--seconds", type=float, default=8.0, help="of heartbeats, in each state; 0 = none")
    parser.add_argument("--record", action="store_true", help="write bench/results/router-scale.json")
    options = parser.parse_args()
    sizes = tuple(map(int, options.sizes.split(",")))
    configure_logging("router", "text", "error")
    record = uvloop.run(measure(sizes, options.requests, options.seconds))
    print(render(record))
    if options.record:
        write_record("router-scale", json.loads(json.dumps(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
