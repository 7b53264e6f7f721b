"""Either worker is killed and comes back, over and over, under load: `python -m bench.restarts --transport shm`.

One prefill and one decode worker of `tandem serve` on the demo model. In the first half of the rounds the prefill
worker is killed, in the second half the decode worker; a round ends when its successor serves and some answers have
come. Before and after each half the cluster comes to rest. Then, as in `bench.soak`, whoever survived the half (the
other worker, the router, `serve`) must hold no more descriptors, threads, mappings and memory than before it, beyond
a small slack. Exit code 1 on that, on a wrong token, on a worker that does not come back, and on one that did not
survive the other's deaths, as happens where the machine itself stands still for seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass

import uvloop

from bench import reliability_page
from bench.fault_load import READY_TIMEOUT_S, Load, Question
from bench.page import RESULTS
from bench.record import write_record
from bench.soak_round import leaks, survivors
from bench.support.cluster import Cluster, becomes_idle, serve
from bench.support.processes import Usage, children, usage
from engine.loading import resolve_device
from kvtransfer.transports import usable
from tandem.client import AsyncClient, Client
from tandem.errors import TandemError

CLIENTS = 4
PROMPT_TOKENS = 150
OUTPUT_TOKENS = 30
NUM_QUESTIONS = 16
CALLS_EACH_ROUND = 8
BACK_WITHIN_S = 150.0
"""Longer than anything else that runs on the machine should keep these processes from running."""
IDLE_WITHIN_S = 20.0
_POLL_S = 0.05
_ENDLESS = 10**9
VICTIMS = ("prefill-0", "decode-0")
_OPTIONS = (
    *("--prefill", "1", "--decode", "1", "--kv-blocks", "200", "--patience-seconds", "60"),
    "--no-prefix-cache",
)
"""Without caches, each prompt travels. A busy machine takes long to load a worker."""


@dataclass(frozen=True, slots=True)
class Half:
    """What came of killing one worker again and again."""

    victim: str
    rounds: int
    calls: int
    failed: Mapping[str, int]
    """By reason."""
    before: Mapping[str, Usage]
    after: Mapping[str, Usage]
    """Of each process that survived."""
    violations: tuple[str, ...]


class Restarts:
    """The rounds on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        questions = [Question(number, PROMPT_TOKENS, OUTPUT_TOKENS) for number in range(NUM_QUESTIONS)]
        self._load = Load(cluster.target, CLIENTS, _ENDLESS, questions)

    async def run(self, rounds: int) -> list[Half]:
        """Both halves, of so many rounds each; one round goes before each and is not counted."""
        async with AsyncClient(self._cluster.target) as operator:
            await operator.wait_ready(READY_TIMEOUT_S)
            await self._load.learn()
            return [await self._half(operator, victim, rounds) for victim in VICTIMS]

    async def _half(self, operator: AsyncClient, victim: str, rounds: int) -> Half:
        violations: list[str] = []
        async with self._loading():  # what is made once per process
            await self._round(operator, victim)
        before = await self._look_at_rest(violations)
        first = len(self._load.calls)
        async with self._loading():
            for number in range(rounds):
                print(f"{victim}: round {number + 1} of {rounds}", flush=True)
                await self._round(operator, victim)
        after = await self._look_at_rest(violations)
        calls = self._load.calls[first:]
        wrong = sum(call.is_wrong for call in calls)
        violations += [f"{wrong} answers with wrong tokens"] if wrong else []
        violations += leaks(before, after)
        stayed = {name: (then, now) for name, then, now in survivors(before, after)}
        violations += [f"{name} did not survive" for name in sorted(before.keys() - stayed.keys() - {victim})]
        return Half(
            victim,
            rounds,
            len(calls),
            dict(Counter(call.error for call in calls if call.error)),
            {name: then for name, (then, _) in stayed.items()},
            {name: now for name, (_, now) in stayed.items()},
            tuple(violations),
        )

    @contextlib.asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """Clients call while inside."""
        loading = asyncio.create_task(self._load.run(waits_until_ready=True))
        try:
            await self._load.ended(len(self._load.calls) + CALLS_EACH_ROUND)
            yield
        finally:
            loading.cancel()
            await asyncio.wait({loading})

    async def _round(self, operator: AsyncClient, victim: str) -> None:
        """Raises TimeoutError if the victim does not come back."""
        pid = await _serving(operator, victim, 0)  # where all stands still, `serve` may have killed it by itself
        os.kill(pid, signal.SIGKILL)
        await _serving(operator, victim, pid)
        await self._load.ended(len(self._load.calls) + CALLS_EACH_ROUND)

    async def _look_at_rest(self, violations: list[str]) -> dict[str, Usage]:
        with Client(self._cluster.target) as client:
            if not await asyncio.to_thread(becomes_idle, client, IDLE_WITHIN_S):
                violations.append(f"not at rest: {client.status()}")
        pids = {"serve": self._cluster.process.pid} | children(self._cluster.process.pid)
        return {name: found for name, pid in pids.items() if (found := usage(pid)) is not None}


async def _serving(operator: AsyncClient, worker: str, old_pid: int) -> int:
    """The worker's process id, once it serves as another process than the old one. Raises TimeoutError."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while True:
            with contextlib.suppress(TandemError):
                for each in (await operator.status()).workers:
                    if each.info.worker_id == worker and each.info.pid != old_pid and each.state == "serving":
                        return each.info.pid
            await asyncio.sleep(_POLL_S)  # a status tells nobody that it changed


def run(transport: str, rounds: int) -> list[Half]:
    """Both halves, of so many rounds each, on a cluster of its own."""
    with (
        serve("demo", "--transport", transport, *_OPTIONS) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(Restarts(cluster).run(rounds))


def main() -> int:
    """Runs, prints, records; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.restarts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="", help="default: each that works here, one after the other")
    parser.add_argument("--rounds", type=int, default=100, help="of each transport")
    parser.add_argument("--record", action="store_true", help="in bench/results/restarts.json, and on the page")
    options = parser.parse_args()
    names = [options.transport] if options.transport else usable(resolve_device("auto"))
    results = {name: run(name, (options.rounds + 1) // 2) for name in names}
    violations = []
    for name, halves in results.items():
        for half in halves:
            print(f"{name}, {half.victim} killed {half.rounds} times: {half.calls} calls, failed: {half.failed}")
            for survivor, then in half.before.items():
                print(f"  {survivor}: {then} became {half.after[survivor]}")
            violations += [f"{name}, {half.victim}: {what}" for what in half.violations]
    print(*violations, sep="\n")
    if options.record:
        path = RESULTS / "restarts.json"
        known = json.loads(path.read_text())["results"] if path.exists() else {}  # of other transports
        write_record("restarts", known | {name: [asdict(half) for half in halves] for name, halves in results.items()})
        reliability_page.main()
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
