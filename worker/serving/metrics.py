"""What happens to requests on a worker, counted; and its load, read when asked. The same for both roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.prefix_cache import CacheCounters
from shell.clock import Clock
from shell.telemetry import metric_names as names
from shell.telemetry.metrics import Metrics, Reading
from shell.telemetry.observers import SequenceObserver, StepReport, WorkerObserver
from tandem.errors import TandemError, TransferError
from tandem.types import GroupSpec, MoveReason, Role, WaitReason, WorkerLoad


class WorkerMetrics(WorkerObserver):
    """Counts for one process."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.clock = clock
        self.sequences = metrics.counter(names.SEQUENCES)
        self.failures = metrics.counter(names.SEQUENCE_FAILURES)
        self.sampled_tokens = metrics.counter(names.SAMPLED_TOKENS)
        self.wait_s = metrics.histogram(names.SEQUENCE_WAIT)
        self.transfers = metrics.counter(names.TRANSFERS)
        self.transfer_failures = metrics.counter(names.TRANSFER_FAILURES)
        self.transfer_s = metrics.histogram(names.TRANSFER_SECONDS)
        self.transfer_bytes = metrics.counter(names.TRANSFER_BYTES)
        self.hand_overs = metrics.counter(names.HAND_OVERS)
        self.cache_queries = metrics.counter(names.PREFIX_CACHE_QUERIES)
        self.cache_hits = metrics.counter(names.PREFIX_CACHE_HITS)
        self._computed_tokens = metrics.counter(names.COMPUTED_PROMPT_TOKENS)
        self._step_s = {kind: metrics.histogram(names.STEP_SECONDS, kind) for kind in ("prefill", "decode", "mixed")}
        self._step_seqs = metrics.histogram(names.STEP_SEQS)
        self._step_tokens = metrics.histogram(names.STEP_TOKENS)

    def sequence(self, spec: GroupSpec, *, for_another: bool = False) -> SequenceObserver:
        """A request arrives."""
        return _Request(self, spec.num_first_tokens)

    def step(self, report: StepReport) -> None:
        """A step is over."""
        num_prefill_tokens, num_decode_seqs = report.num_prefill_tokens, report.num_decode_seqs
        kind = "decode" if not num_prefill_tokens else "mixed" if num_decode_seqs else "prefill"
        self._step_s[kind].observe(report.seconds)
        self._step_seqs.observe(len(report.specs))
        self._step_tokens.observe(num_prefill_tokens + num_decode_seqs)
        self._computed_tokens.add(num_prefill_tokens)
        self.sampled_tokens.add(num_decode_seqs)


class _Request(SequenceObserver):
    """One request's way; what waits, is reserved or preempted is read from the load."""

    def __init__(self, of: WorkerMetrics, num_first_tokens: int) -> None:
        self._of = of
        self._num_first_tokens = num_first_tokens
        self._arrived_s = of.clock.now_s()
        self._started = False
        self._transferring = False

    def looked_up(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._of.cache_queries.add(num_tokens)
        self._of.cache_hits.add(num_cached_tokens)

    def started(self) -> None:
        if not self._started:
            self._started = True
            self._of.wait_s.observe(self._of.clock.now_s() - self._arrived_s)

    def first_token(self) -> None:
        self._of.sampled_tokens.add(self._num_first_tokens)

    def transfer_started(self) -> None:
        self._transferring = True

    def transferred(self, num_bytes: int, seconds: float, transport: str | None) -> None:
        of = self._of
        self._transferring = False
        of.transfers.add(1, "committed")
        of.transfer_s.observe(seconds)
        of.transfer_bytes.add(num_bytes)

    def moved(self, reason: MoveReason) -> None:
        self._of.hand_overs.add(1, reason)

    def ended(self, error: TandemError | None, num_tokens: int) -> None:
        of = self._of
        of.sequences.add(1, "ended" if error is None else "failed")
        if error is not None:
            of.failures.add(1, error.reason)
        if isinstance(error, TransferError):
            of.transfers.add(1, "failed")
            of.transfer_failures.add(1, error.reason)
        elif self._transferring:
            of.transfers.add(1, "withdrawn")


def wait_readings(waits: Iterable[tuple[object, WaitReason]]) -> Iterator[Reading]:
    """Who waits, by reason, as a metric."""
    counts = Counter(reason for _, reason in waits)
    return (Reading(names.WAITING_REQUESTS, counts[reason], (reason,)) for reason in WaitReason)


def cache_readings(counters: CacheCounters) -> Iterator[Reading]:
    """What a worker's prefix cache has done, as metrics."""
    yield Reading(names.PREFIX_CACHE_EVICTED, counters.evicted_blocks)
    yield Reading(names.PREFIX_CACHE_STORED, counters.host_stored_blocks, ("host",))
    yield Reading(names.PREFIX_CACHE_LOADED, counters.host_loaded_blocks, ("host",))
    yield Reading(names.PREFIX_CACHE_STORED, counters.disk_stored_blocks, ("disk",))
    yield Reading(names.PREFIX_CACHE_LOADED, counters.disk_loaded_blocks, ("disk",))
    yield Reading(names.PREFIX_CACHE_FAILED, counters.disk_failed_blocks, ("disk",))


def load_readings(role: Role, load: WorkerLoad) -> Iterator[Reading]:
    """A worker's load as metrics."""
    pool = load.pool
    yield Reading(names.RUNNING_SEQS, load.running_seqs)
    yield Reading(names.WAITING_SEQS, load.waiting_seqs)
    yield Reading(names.DRAINING, load.draining)
    yield Reading(names.ENGINE_STEPS, load.engine_steps)
    yield Reading(names.TRANSFERS_LIVE, load.live_transfers)
    yield Reading(names.POOL_USAGE, 1 - (pool.free + pool.cached) / pool.total)
    yield Reading(names.POOL_UNUSED_SLOTS, pool.unused_slots)
    yield Reading(names.POOL_INFO, 1, (str(pool.block_size), str(pool.total)))
    yield Reading(names.POOL_BLOCK_TOKENS, pool.block_size)
    for state in names.BLOCK_STATES:
        yield Reading(names.POOL_BLOCKS, getattr(pool, state), (state,))
    yield Reading(names.PROMPT_RATE, load.prompt_tokens_per_s)
    if role.decodes:
        yield Reading(names.DECODE_QUEUED_TOKENS, load.queued_prompt_tokens)
        yield Reading(names.PREEMPTIONS, load.preemptions)
        yield Reading(names.DECODE_STEP_AVERAGE, load.step_s)
        yield Reading(names.STEP_OBJECTIVE, load.step_objective_s)
    else:
        yield Reading(names.PREFILL_QUEUED_TOKENS, load.queued_prompt_tokens)
