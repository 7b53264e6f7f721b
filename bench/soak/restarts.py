"""Either worker is killed and comes back, over and over, under load: `python -m bench.soak --kind restart`.

One prefill and one decode worker of `tandem serve` on the demo model, over one transport after the other. In the first
half of the rounds the prefill worker is killed, in the second half the decode worker; a round ends when its successor
serves and some answers have come. Before and after each half the cluster comes to rest. Then whoever survived the half
(the other worker, the router, `serve`) must hold no more descriptors, threads, mappings and memory than before it,
beyond a small slack. A violation is that, a wrong token, a worker that does not come back, and one that did not survive
the other's deaths, as happens where the machine itself stands still for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import uvloop

from bench.soak.round import leaks, look, survivors
from bench.support.cluster import Cluster, becomes_idle, serve
from bench.support.processes import Usage
from bench.support.witness import Witness, random_questions
from tandem.client import AsyncClient, Client
from tandem.errors import TandemError

CLIENTS = 4
NUM_QUESTIONS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 150, 30
REQUEST_TIMEOUT_S = 30.0
CALLS_EACH_ROUND = 8
BACK_WITHIN_S = 150.0
"""Longer than anything else that runs on the machine should keep these processes from running."""
IDLE_WITHIN_S = 20.0
_READY_TIMEOUT_S = 60.0
_POLL_S = 0.05
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
        questions = random_questions(NUM_QUESTIONS, PROMPT_TOKENS, OUTPUT_TOKENS)
        self._witness = Witness(cluster.target, CLIENTS, questions, waits_until_ready=True, timeout_s=REQUEST_TIMEOUT_S)

    async def run(self, rounds: int) -> list[Half]:
        """Both halves, of so many rounds each; one round goes before each and is not counted."""
        async with AsyncClient(self._cluster.target) as operator:
            await operator.wait_ready(_READY_TIMEOUT_S)
            return [await self._half(operator, victim, rounds) for victim in VICTIMS]

    async def _half(self, operator: AsyncClient, victim: str, rounds: int) -> Half:
        violations: list[str] = []
        await self._kill(operator, victim, 1)  # what is made once per process
        before = await self._look_at_rest(violations)
        first = len(self._witness.sightings)
        await self._kill(operator, victim, rounds)
        after = await self._look_at_rest(violations)
        calls = self._witness.sightings[first:]
        wrong = sum(call.is_wrong for call in calls)
        violations += [f"{wrong} answers with wrong tokens"] if wrong else []
        violations += leaks(before, after)
        stayed = {name: (then, now) for name, then, now in survivors(before, after)}
        violations += [f"{name} did not survive" for name in sorted(before.keys() - stayed.keys() - {victim})]
        reasons = (call.error.partition(":")[0] for call in calls if call.error and not call.is_wrong)
        return Half(
            victim,
            rounds,
            len(calls),
            dict(Counter(reasons)),
            {name: then for name, (then, _) in stayed.items()},
            {name: now for name, (_, now) in stayed.items()},
            tuple(violations),
        )

    async def _kill(self, operator: AsyncClient, victim: str, rounds: int) -> None:
        """Rounds under load. Raises TimeoutError if the victim does not come back."""
        async with self._witness.watching():
            await self._witness.see(CALLS_EACH_ROUND)
            for number in range(rounds):
                print(f"{victim}: round {number + 1} of {rounds}", flush=True)
                pid = await _serving(operator, victim, 0)  # where all stands still, `serve` may have killed it itself
                os.kill(pid, signal.SIGKILL)
                await _serving(operator, victim, pid)
                await self._witness.see(CALLS_EACH_ROUND)

    async def _look_at_rest(self, violations: list[str]) -> dict[str, Usage]:
        with Client(self._cluster.target) as client:
            if not await asyncio.to_thread(becomes_idle, client, IDLE_WITHIN_S):
                violations.append(f"not at rest: {client.status()}")
        return look(self._cluster)


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
