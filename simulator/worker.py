"""One simulated worker: the real core of its role, on an engine and hand-offs that only take time.

    registered ─ a request comes ─▶ busy: its core runs, sends heartbeats ─ nothing is left ─▶ registered
         └───────────────────────────┴─ lost ─▶ gone ─ comes back, as another incarnation ─▶ registered

A worker without requests costs nothing: no core is made before it is needed, and it runs only while it has work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from random import Random

from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.chunking import ChunkTokens, EngineSizes
from engine.prefix_cache import PrefixCache
from kvtransfer.base import Sender
from prefill_worker.prompts import new_prefill_worker
from router.prefix_map import PrefixMap
from shell.config import DecodeConfig
from simulator.costs import CostModel
from simulator.engine import Host, SimulatedEngine
from simulator.loop import SimulatedClock
from simulator.transfers import TRANSPORT, Network, SimulatedReceiver, SimulatedSender
from tandem.limits import Limits
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad
from tandem.validation import Validator
from worker.core import Worker
from worker.ports import RouterPort, WorkerParts
from worker.serving.cache_reports import CacheNews, CacheReports

HEARTBEAT_S = 0.25
VOCAB_SIZE = 2**31 - 1
MODEL = "simulated"


class Link:
    """What `router.workers.Workers` needs of a stream: it stands as long as the worker does."""

    def __init__(self) -> None:
        self.connected = True
        self.held = PrefixMap()

    def close(self) -> None:
        """The worker is gone."""
        self.connected = False

    async def wait_closed(self) -> None:
        """At once."""


class SimulatedWorker:
    """A worker over all its lives."""

    def __init__(
        self,
        name: str,
        role: Role,
        costs: CostModel,
        network: Network,
        host: Host,
        on_heartbeat: Callable[[WorkerInfo, WorkerLoad], None],
        *,
        computes_prompts: bool,
        seed: int,
    ) -> None:
        """`computes_prompts`: whether a decode worker computes all prompts for itself."""
        self.role = role
        self.busy_s = self.prompt_s = 0.0
        """Seconds of lives that have ended."""
        self.queued_tokens_s = self.pool_share_s = 0.0
        """Prompt tokens that waited here, and the share of the pool in use, each times its duration."""
        self.ports: dict[RouterPort, None] = {}
        """Who has a request here."""
        self.link = Link()
        self._name = name
        self._costs = costs
        self._network = network
        self._host = host
        self._on_heartbeat = on_heartbeat
        self._local_tokens = None if role is Role.ELASTIC or computes_prompts else 0
        self._rng = Random(f"{seed} {name}")
        self._num_lives = 0
        self._life: _Life | None = None
        self._inbox: deque[tuple[int, Callable[[Worker], None]]] = deque()
        self.is_up = False

    @property
    def info(self) -> WorkerInfo:
        """Describes this life of the worker."""
        costs = self._costs
        return WorkerInfo(
            worker_id=WorkerId(self._name),
            incarnation=Incarnation(f"{self._name}/{self._num_lives}"),
            role=self.role,
            address=self._name,
            model=MODEL,
            config_fingerprint=MODEL,
            model_fingerprint=MODEL,
            layout_fingerprint=MODEL,
            transports=(TRANSPORT,),
            local_prefill_tokens=self._local_tokens if self.role.decodes else None,
            max_sequence_tokens=costs.max_sequence_tokens,
            pid=0,
            device="cpu",
            pool_tokens=costs.max_sequence_tokens if self.role.decodes else 0,
            max_seqs=costs.max_seqs,
        )

    def come(self) -> None:
        """Begins a life."""
        self._num_lives += 1
        self.is_up = True
        self.link = Link()
        self._on_heartbeat(self.info, self._idle_load())

    def go(self) -> tuple[RouterPort, ...]:
        """Ends the life with all that it holds; returns the routers whose requests ran here."""
        self.is_up = False
        self.link.close()
        ports, self.ports = tuple(self.ports), {}
        if self._life is not None:
            for port in ports:
                self._life.core.router_lost(port)
            self._life.end()
            self._count_use(self._life)
            self._life = None
        return ports

    def ask(self, port: RouterPort, what: Callable[[Worker], None]) -> None:
        """Sends its core a message, which arrives after a while and in order; nowhere if the worker is lost by then."""
        self.ports[port] = None
        self._inbox.append((self._num_lives, what))
        asyncio.get_running_loop().call_later(self._costs.message_s, self._receive)

    def leave(self, port: RouterPort) -> None:
        """Nothing more is asked for."""
        self.ports.pop(port, None)

    @property
    def use(self) -> tuple[float, float]:
        """Seconds in steps, and how many of them prompts took, in all lives."""
        if self._life is None:
            return self.busy_s, self.prompt_s
        return self.busy_s + self._life.engine.busy_s, self.prompt_s + self._life.engine.prompt_s

    def check_idle(self) -> None:
        """Raises InternalError if anything is held that should be free."""
        if self._life is not None:
            self._life.core.check_idle()

    def stop(self) -> None:
        """The simulation is over."""
        if self._life is not None:
            self._life.end()

    def _receive(self) -> None:
        life_number, what = self._inbox.popleft()
        if life_number != self._num_lives or not self.is_up:
            return
        if self._life is None:
            self._life = _Life(self.role, self._costs, self._network, self._host, self.link, self._rng)
        self._life.run(self._beat)
        what(self._life.core)

    def _beat(self) -> None:
        if self._life is None or not self.is_up:
            return
        load = self._life.core.load()
        self._on_heartbeat(self.info, load)
        self.queued_tokens_s += HEARTBEAT_S * load.queued_prompt_tokens
        self.pool_share_s += HEARTBEAT_S * (1 - (load.pool.free + load.pool.cached) / load.pool.total)
        if not self.ports and self._life.is_idle:
            self._life.rest()

    def _idle_load(self) -> WorkerLoad:
        total = self._costs.pool_blocks
        pool = PoolCounts(total, total, 0, 0, 0, 0, self._costs.block_size, 0)
        return WorkerLoad(0, 0, 0, 0, pool, 0, draining=False)

    def _count_use(self, life: _Life) -> None:
        self.busy_s += life.engine.busy_s
        self.prompt_s += life.engine.prompt_s


class _Life:
    """Core, engine and caches from the first request to the loss of the worker."""

    def __init__(
        self,
        role: Role,
        costs: CostModel,
        network: Network,
        host: Host,
        link: Link,
        rng: Random,
    ) -> None:
        step = costs.decode_step or costs.step if role is Role.DECODE else costs.step
        self.engine = SimulatedEngine(step, host, rng, costs.jitter)
        self._rng = rng
        self._news = ExitStack()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        cache = PrefixCache(BlockPool(costs.pool_blocks, costs.block_size))
        reports = CacheReports(cache)
        cache.listener = reports
        news = CacheNews(lambda: _tell(news, link))
        self._news.enter_context(reports.telling(news))
        self._receiver = SimulatedReceiver(network)
        self.core = _core(role, costs, self.engine, cache, self._receiver, SimulatedSender(network))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held or under way; blocks of what was released are held until their step has ended."""
        load = self.core.load()
        is_held = load.pool.free + load.pool.cached < load.pool.total
        return not (load.running_seqs or load.waiting_seqs or load.live_transfers or is_held)

    def run(self, beat: Callable[[], None]) -> None:
        """Runs steps, and calls `beat` at intervals, until no work is left."""
        if self._task is None:
            self._task = asyncio.create_task(self.core.run())
            self._schedule(beat, HEARTBEAT_S * self._rng.random())  # a real worker's beats go on while it rests

    def rest(self) -> None:
        """Nothing is to be done."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """For ever."""
        self.rest()
        self._news.close()

    def _schedule(self, beat: Callable[[], None], after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._beat, beat)

    def _beat(self, beat: Callable[[], None]) -> None:
        self._schedule(beat, HEARTBEAT_S)
        beat()


def _tell(news: CacheNews, link: Link) -> None:
    """The router hears what the cache holds."""
    changes = news.take()
    if changes is not None and link.connected:
        link.held.change(changes.stored, changes.removed, cleared=changes.cleared)


def _core(
    role: Role,
    costs: CostModel,
    engine: SimulatedEngine,
    cache: PrefixCache,
    receiver: SimulatedReceiver,
    sender: Sender,
) -> Worker:
    sizes = EngineSizes(
        ChunkTokens(costs.chunk_tokens, costs.prefill_chunk_tokens), costs.max_seqs, costs.max_sequence_tokens
    )
    validator = Validator(Limits(), VOCAB_SIZE, context_tokens=sizes.max_sequence_tokens)
    parts = WorkerParts(engine, cache, sizes, validator, SimulatedClock())
    if role is Role.PREFILL:
        return new_prefill_worker(parts, sender)
    return new_decode_worker(parts, receiver, DecodeConfig(elastic=role is Role.ELASTIC), sender)
