"""Two elastic workers' cores that compute prompts for each other, in one loop: no gRPC, no model, no wire.

As `tests.joined_cores`, but each worker is prefill worker and decode worker at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from router.placement import Placement
from shell.config import ElasticConfig
from tandem.errors import TandemError
from tandem.types import ChoiceSpec, GroupSpec, Incarnation, Role, TokenId, WorkerId, WorkerInfo
from tests.joined_cores import CoreLink, Cores, Ids, attempt_of, delivery_of, info_of
from tests.manual_clock import ManualClock
from tests.token_engine import WAIT_S, FakeEngine
from tests.wire import BLOCK_SIZE, Wire
from tests.worker_parts import parts_of
from worker.core import Worker

NAMES = ("a", "b")
_NEVER_S = 1e9
_TICK_S = 0.3


class ElasticCores(Cores):
    """Workers `a` and `b`."""

    def __init__(self, *, blocks: tuple[int, int] = (32, 32), max_seqs: int = 8, chunk_tokens: int = 8) -> None:
        self.clock = ManualClock()
        pools = [BlockPool(count, BLOCK_SIZE) for count in blocks]
        self.engines = dict(zip(NAMES, (FakeEngine(pool) for pool in pools), strict=True))
        self.caches = dict(zip(NAMES, (PrefixCache(pool) for pool in pools), strict=True))
        wires: dict[str, Any] = {
            "a": Wire(self.engines["b"], self.engines["a"]),
            "b": Wire(self.engines["a"], self.engines["b"]),
        }  # by who receives
        config = ElasticConfig(inter_token_objective_s=0.0)
        self.cores: dict[str, Worker] = {}
        for name, other in (NAMES, NAMES[::-1]):
            sizes = {"max_seqs": max_seqs, "chunk_tokens": chunk_tokens}
            parts = parts_of(self.engines[name], self.caches[name], self.clock, **sizes)
            self.cores[name] = new_decode_worker(parts, wires[name], config, wires[other], first_guess_tokens=4)
        self.infos = {name: _info_of(name) for name in NAMES}
        self.links = {name: CoreLink(self.infos[name], core) for name, core in self.cores.items()}

        self.workers = [(self.engines[name], self.cores[name], self.links[name]) for name in NAMES]

    def link(self, info: WorkerInfo) -> CoreLink:
        """As `Workers` gives it."""
        return self.links[info.worker_id]

    def start(self, spec: GroupSpec, prefill: str | None, decode: str) -> Asked:
        """A request, on this pair, as often as it takes."""
        return Asked(self, spec, Placement(None if prefill is None else self.infos[prefill], self.infos[decode]))

    async def until_done(self, asked: list[Asked]) -> None:
        """Time passes until all have ended."""
        async with asyncio.timeout(WAIT_S):
            while not all(each.task.done() for each in asked):
                for _ in range(50):
                    await asyncio.sleep(0)
                self.clock.advance_s(_TICK_S)
                for core in self.cores.values():
                    core.tick()


class Asked:
    """One request, which a router would try again where its failure is retryable."""

    def __init__(self, cores: ElasticCores, spec: GroupSpec, placement: Placement) -> None:
        self.spec = spec
        self.failures: list[TandemError] = []
        self._cores, self._placement = cores, placement
        self._ids = [Ids() for _ in spec.choices]
        self.task = asyncio.create_task(self._run())

    @property
    def tokens(self) -> list[TokenId]:
        """Of the first choice, so far."""
        return self.choices[0]

    @property
    def choices(self) -> list[list[TokenId]]:
        """Tokens of each, so far."""
        return [each.ids for each in self._ids]

    async def _run(self) -> None:
        cores, delivery = self._cores, delivery_of(self._ids)
        while True:
            attempt = attempt_of(cores, self._placement, delivery, _NEVER_S)
            try:
                choices = tuple(ChoiceSpec(index, tuple(tokens)) for index, tokens in enumerate(self.choices))
                await attempt.run(replace(self.spec, choices=choices))
                return
            except TandemError as error:
                self.failures.append(error)
                if not error.retryable:
                    raise
                await asyncio.sleep(0)
            finally:
                attempt.release()


def _info_of(name: str) -> WorkerInfo:
    return replace(
        info_of(Role.ELASTIC),
        worker_id=WorkerId(name),
        incarnation=Incarnation(f"{name}-life"),
        local_prefill_tokens=None,
    )
