"""What happens to requests on a worker, counted; and its load, read when asked. The same for both roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.cache_counters import CacheCounters
from engine.graphs import StepGraphs
from kvtransfer.base import SenderGaveUp
from shell.clock import Clock
from shell.telemetry import events
from shell.telemetry import metric_names as names
from shell.telemetry.metrics import Metrics, Reading
from tandem.errors import TransferError
from tandem.types import Role, WaitReason, WorkerLoad


class WorkerMetrics:
    """A worker's counters and histograms."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.clock = clock
        self.sequences = metrics.counter(names.SEQUENCES)
        self.failures = metrics.counter(names.SEQUENCE_FAILURES)
        self.sampled_tokens = metrics.counter(names.SAMPLED_TOKENS)
        self.wait_s = metrics.histogram(names.SEQUENCE_WAIT)
        self.transfers = metrics.counter(names.TRANSFERS)
        self.transfer_failures = metrics.counter(names.TRANSFER_FAILURES)
        self.transports_barred = metrics.counter(names.TRANSPORTS_BARRED)
        self.sent_s = metrics.histogram(names.TRANSFER_SECONDS, "sent")
        self.received_s = metrics.histogram(names.TRANSFER_SECONDS, "received")
        self.transfer_sizes = metrics.histogram(names.TRANSFER_SIZE)
        self.num_received_tokens = 0
        """Tokens whose KV came by a hand-off."""
        self.moves = metrics.counter(names.MOVES)
        self.cache_queries = metrics.counter(names.PREFIX_CACHE_QUERIES)
        self.cache_hits = metrics.counter(names.PREFIX_CACHE_HITS)
        self._computed_tokens = metrics.counter(names.COMPUTED_PROMPT_TOKENS)
        self._step_s = {kind: metrics.histogram(names.STEP_SECONDS, kind) for kind in ("prefill", "decode", "mixed")}
        self._step_seqs = metrics.histogram(names.STEP_SEQS)
        self._step_tokens = metrics.histogram(names.STEP_TOKENS)
        metrics.add_reader(self._read)

    def hear(self, event: events.WorkerEvent) -> events.SequenceListener | None:
        """A listener of the process. Returns the listener of a sequence that arrives."""
        match event:
            case events.SequenceArrived():
                return _Sequence(self, event.spec.num_first_tokens).hear
            case events.StepEnded(seconds, num_prefill_tokens, num_decode_seqs, num_seqs):
                kind = "decode" if not num_prefill_tokens else "mixed" if num_decode_seqs else "prefill"
                self._step_s[kind].observe(seconds)
                self._step_seqs.observe(num_seqs)
                self._step_tokens.observe(num_prefill_tokens + num_decode_seqs)
                self._computed_tokens.add(num_prefill_tokens)
                self.sampled_tokens.add(num_decode_seqs)
            case events.TransportBarred(transport):
                self.transports_barred.add(1, transport)
        return None

    def _read(self) -> Iterator[Reading]:
        """Returns what other figures say under further names."""
        yield Reading(names.TRANSFER_BYTES, self.transfer_sizes.sum)
        sources = self._computed_tokens[()], self.cache_hits[()], self.num_received_tokens
        for (source,), num_tokens in zip(names.PROMPT_TOKENS_BY_SOURCE.presets, sources, strict=True):
            yield Reading(names.PROMPT_TOKENS_BY_SOURCE, num_tokens, (source,))


class _Sequence:
    """One sequence's way; what waits, is reserved or preempted is read from the load."""

    def __init__(self, of: WorkerMetrics, num_first_tokens: int) -> None:
        self._of = of
        self._num_first_tokens = num_first_tokens
        self._arrived_s = of.clock.now_s()
        self._started = False
        self._transferring = False
        self._num_lacking = 0
        """Tokens whose KV the cache lacked."""

    def hear(self, event: events.SequenceEvent) -> None:
        of = self._of
        match event:
            case events.PrefixLookedUp():
                of.cache_queries.add(event.num_tokens)
                of.cache_hits.add(event.num_cached_tokens)
                self._num_lacking = event.num_tokens - event.num_cached_tokens
            case events.Started() if not self._started:
                self._started = True
                of.wait_s.observe(of.clock.now_s() - self._arrived_s)
            case events.FirstToken():
                of.sampled_tokens.add(self._num_first_tokens)
            case events.TransferStarted():
                self._transferring = True
            case events.Transferred():
                self._transferring = False
                of.transfers.add(1, "committed")
                if event.transport is None:
                    of.received_s.observe(event.seconds)
                    of.num_received_tokens += self._num_lacking
                else:
                    of.sent_s.observe(event.seconds)
                    of.transfer_sizes.observe(event.num_bytes)
            case events.Moved():
                of.moves.add(1, event.reason)
            case events.SequenceEnded():
                self._ended(event)

    def _ended(self, event: events.SequenceEnded) -> None:
        of, error = self._of, event.error
        of.sequences.add(1, "ended" if error is None else "failed")
        if error is not None:
            of.failures.add(1, error.reason)
        if isinstance(error, SenderGaveUp):
            of.transfers.add(1, "withdrawn")  # the request ended at the sender, which counts a failure of its own
        elif isinstance(error, TransferError):
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


def graph_readings(graphs: StepGraphs) -> Iterator[Reading]:
    """What a worker captured, and how often that served, as metrics."""
    yield Reading(names.CUDA_GRAPHS, graphs.num_captured, ("captured",))
    yield Reading(names.CUDA_GRAPHS, graphs.num_refused, ("refused",))
    for (num_tokens, is_decode), count in graphs.num_steps.items():
        yield Reading(names.CUDA_GRAPH_STEPS, count, (str(num_tokens), "decode" if is_decode else "prompt"))


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
