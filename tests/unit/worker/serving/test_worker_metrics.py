"""What a worker's metrics make of what they are told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.cache_counters import CacheCounters
from kvtransfer.base import SenderGaveUp
from shell.telemetry.events import (
    FirstToken,
    PrefixLookedUp,
    ProcessEvents,
    SequenceArrived,
    SequenceEnded,
    SequenceEvents,
    Started,
    StepEnded,
    Transferred,
    TransferStarted,
    TransportBarred,
    WorkerEvents,
)
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.errors import ChecksumMismatch, DeadlineExceeded, TandemError, TransferError
from tandem.types import (
    ChoiceSpec,
    GroupSpec,
    PoolCounts,
    RequestId,
    Role,
    SamplingParams,
    TokenId,
    WaitReason,
    WorkerLoad,
)
from tests.manual_clock import ManualClock
from worker.serving.metrics import WorkerMetrics, cache_readings, graph_readings, load_readings, wait_readings

SPEC = GroupSpec(RequestId("r"), (TokenId(1),) * 4, SamplingParams(max_tokens=8))
LOAD = WorkerLoad(
    engine_steps=7,
    running_seqs=3,
    waiting_seqs=2,
    queued_prompt_tokens=90,
    pool=PoolCounts(
        20, free=3, reserved=1, receiving=2, live=11, quarantined=1, block_size=16, unused_slots=9, cached=2
    ),
    live_transfers=4,
    draining=True,
    preemptions=6,
)


class Scene:
    """A worker's metrics, and the clock that its sequences live by."""

    def __init__(self, role: Role) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics(Process(role.value), "demo")
        self.events: WorkerEvents = ProcessEvents(WorkerMetrics(self.metrics, self.clock).hear)
        self.metrics.add_reader(lambda: load_readings(role, LOAD))
        self.metrics.add_reader(lambda: cache_readings(CacheCounters(90, 60, 5, 3, 2, 9, 8, 7)))

    def sequence(self, spec: GroupSpec = SPEC) -> SequenceEvents:
        return self.events.begin(SequenceArrived(spec))

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """By label values."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.metrics.exposition()[0].decode())
            for sample in family.samples
            if sample.name == name
        }

    def value(self, name: str, *labels: Any) -> float:
        return self.samples(name)[labels]


@pytest.fixture
def prefill() -> Scene:
    return Scene(Role.PREFILL)


@pytest.fixture
def decode() -> Scene:
    return Scene(Role.DECODE)


def test_a_sequence_waits_from_arrival_to_its_first_step(prefill: Scene) -> None:
    sequence = prefill.sequence()
    prefill.clock.advance_s(0.5)
    sequence.emit(Started())
    prefill.clock.advance_s(2)
    sequence.emit(Started())  # computed anew after a preemption
    assert prefill.value("tandem_sequence_wait_seconds_count") == 1
    assert prefill.value("tandem_sequence_wait_seconds_sum") == 0.5


@pytest.mark.parametrize(
    ("num_prefill_tokens", "num_decode_seqs", "kind"), [(64, 0, "prefill"), (0, 3, "decode"), (64, 3, "mixed")]
)
def test_a_step_is_told_by_its_kind(decode: Scene, num_prefill_tokens: int, num_decode_seqs: int, kind: str) -> None:
    decode.events.emit(StepEnded(0.02, num_prefill_tokens, num_decode_seqs, 4))
    assert decode.samples("tandem_step_seconds_count") == {
        (each,): float(each == kind) for each in ("prefill", "decode", "mixed")
    }
    assert decode.value("tandem_step_seqs_sum") == 4
    assert decode.value("tandem_step_tokens_sum") == num_prefill_tokens + num_decode_seqs
    assert decode.value("tandem_computed_prompt_tokens_total") == num_prefill_tokens
    assert decode.value("tandem_sampled_tokens_total") == num_decode_seqs


def test_graphs_that_were_refused_show_and_so_do_the_steps_that_the_others_served(decode: Scene) -> None:
    graphs: Any = SimpleNamespace(num_captured=88, num_refused=3, num_steps={(512, False): 41, (8, True): 7})
    decode.metrics.add_reader(lambda: graph_readings(graphs))
    assert decode.samples("tandem_cuda_graphs") == {("captured",): 88, ("refused",): 3}
    assert decode.samples("tandem_cuda_graph_steps_total") == {("prompt", "512"): 41, ("decode", "8"): 7}


def test_transports_that_were_given_up_are_counted_by_name(prefill: Scene) -> None:
    prefill.events.emit(TransportBarred("cuda_ipc"))
    assert prefill.samples("tandem_transports_barred_total") == {("cuda_ipc",): 1}


def test_each_choice_that_is_not_resumed_draws_a_first_token(prefill: Scene) -> None:
    resumed = ChoiceSpec(1, (TokenId(5),))
    prefill.sequence(replace(SPEC, choices=(ChoiceSpec(0), resumed, ChoiceSpec(2)))).emit(FirstToken())
    assert prefill.value("tandem_sampled_tokens_total") == 2
    prefill.sequence(replace(SPEC, choices=(resumed,))).emit(FirstToken())
    assert prefill.value("tandem_sampled_tokens_total") == 3


@pytest.mark.parametrize("prefix", ["tandem_prefix_cache", "vllm:prefix_cache"])
def test_tokens_that_were_looked_for_and_found_are_counted(prefill: Scene, prefix: str) -> None:
    for num_cached_tokens in (0, 16):
        prefill.sequence().emit(PrefixLookedUp(20, num_cached_tokens))
    labels = next(iter(prefill.samples(f"{prefix}_hits_total")))
    assert prefill.value(f"{prefix}_queries_total", *labels) == 40
    assert prefill.value(f"{prefix}_hits_total", *labels) == 16


def test_blocks_that_the_cache_evicted_stored_and_loaded_are_counted(decode: Scene) -> None:
    assert decode.value("tandem_prefix_cache_evicted_blocks_total") == 5
    assert decode.value("tandem_prefix_cache_stored_blocks_total", "host") == 3
    assert decode.value("tandem_prefix_cache_loaded_blocks_total", "host") == 2
    assert decode.value("tandem_prefix_cache_stored_blocks_total", "disk") == 9
    assert decode.value("tandem_prefix_cache_loaded_blocks_total", "disk") == 8
    assert decode.value("tandem_prefix_cache_failed_blocks_total", "disk") == 7


def test_the_sender_counts_a_hand_offs_bytes(prefill: Scene) -> None:
    sequence = prefill.sequence()
    sequence.emit(TransferStarted())
    sequence.emit(Transferred(4096, 0.01, "shm"))
    sequence.emit(SequenceEnded(None, 1))
    assert prefill.value("tandem_transfers_total", "committed") == 1
    assert prefill.value("tandem_transfer_bytes_total") == 4096
    assert prefill.value("tandem_sequences_total", "ended") == 1
    assert prefill.value("tandem_transfer_seconds_sum", "sent") == 0.01
    assert prefill.value("vllm:nixl_xfer_time_seconds_sum", "0", "demo") == 0.01
    assert prefill.value("vllm:nixl_bytes_transferred_sum", "0", "demo") == 4096


def test_the_receiver_counts_tokens_and_under_the_names_of_nixl_a_hand_off_counts_once(decode: Scene) -> None:
    sequence = decode.sequence()
    sequence.emit(PrefixLookedUp(20, 16))
    sequence.emit(TransferStarted())
    sequence.emit(Transferred(0, 0.02, None))
    decode.events.emit(StepEnded(0.01, num_prefill_tokens=5, num_decode_seqs=0, num_seqs=1))
    decode.sequence().emit(SequenceEnded(ChecksumMismatch("bad"), 0))
    labels = ("0", "demo")
    sources = decode.samples("vllm:prompt_tokens_by_source_total")
    assert sources == {
        (*labels, "local_compute"): 5,
        (*labels, "local_cache_hit"): 16,
        (*labels, "external_kv_transfer"): 4,
    }
    assert decode.value("tandem_transfer_seconds_count", "received") == 1
    assert decode.value("vllm:nixl_xfer_time_seconds_count", *labels) == 0
    assert decode.value("vllm:nixl_num_failed_transfers_total", *labels) == 1


@pytest.mark.parametrize(
    ("error", "transfer", "num_failures"),
    [
        (ChecksumMismatch("block 3"), "failed", 1),
        (SenderGaveUp("the sender gave up"), "withdrawn", 0),
        (DeadlineExceeded("late"), "withdrawn", 0),
        (None, "withdrawn", 0),
    ],
)
def test_a_hand_off_that_was_under_way_fails_by_its_own_faults_only(
    decode: Scene, error: TandemError | None, transfer: str, num_failures: int
) -> None:
    sequence = decode.sequence()
    sequence.emit(TransferStarted())
    sequence.emit(SequenceEnded(error, 0))
    assert decode.value("tandem_transfers_total", transfer) == 1
    failures = decode.samples("tandem_transfer_failures_total")
    assert failures["CHECKSUM_MISMATCH",] == sum(failures.values()) == num_failures


@pytest.mark.parametrize("cls", [TransferError, *TransferError.__subclasses__()])
def test_every_reason_why_a_hand_off_fails_stands_at_zero_before_it_does(
    decode: Scene, cls: type[TransferError]
) -> None:
    assert decode.value("tandem_transfer_failures_total", cls.reason) == 0
    assert decode.value("tandem_sequence_failures_total", cls.reason) == 0


def test_a_sequence_that_fails_after_its_hand_off_leaves_the_hand_off_committed(decode: Scene) -> None:
    sequence = decode.sequence()
    sequence.emit(TransferStarted())
    sequence.emit(Transferred(0, 0.02, None))
    sequence.emit(SequenceEnded(DeadlineExceeded("late"), 3))
    assert decode.samples("tandem_transfers_total") == {("committed",): 1, ("failed",): 0, ("withdrawn",): 0}
    assert decode.value("tandem_transfer_bytes_total") == 0, "the sender counts them"
    assert decode.value("tandem_sequences_total", "failed") == 1
    assert decode.value("tandem_sequence_failures_total", "DEADLINE_EXCEEDED") == 1


def test_the_load_is_told_as_it_is(decode: Scene) -> None:
    told = {
        name: decode.value(f"tandem_{name}")
        for name in (
            *("running_seqs", "waiting_seqs", "decode_queued_prompt_tokens", "transfers_live", "draining"),
            *("kv_pool_usage_ratio", "kv_pool_unused_slots", "kv_pool_block_tokens"),
            *("engine_steps_total", "preemptions_total"),
        )
    }
    assert told == {
        "running_seqs": 3,
        "waiting_seqs": 2,
        "decode_queued_prompt_tokens": 90,
        "transfers_live": 4,
        "draining": 1,
        "kv_pool_usage_ratio": 0.75,
        "kv_pool_unused_slots": 9,
        "kv_pool_block_tokens": 16,
        "engine_steps_total": 7,
        "preemptions_total": 6,
    }
    assert decode.samples("tandem_kv_pool_blocks") == {
        ("free",): 3,
        ("reserved",): 1,
        ("receiving",): 2,
        ("live",): 11,
        ("quarantined",): 1,
        ("cached",): 2,
    }
    assert decode.value("vllm:kv_cache_usage_perc", "0", "demo") == 0.75
    assert decode.value("tandem_kv_pool_info", "16", "20") == 1
    assert decode.value("vllm:cache_config_info", "16", "0", "demo", "20") == 1


def test_who_waits_is_counted_by_reason(decode: Scene) -> None:
    waits = [("a", WaitReason.SEAT), ("b", WaitReason.SEAT), ("c", WaitReason.ROOM)]
    decode.metrics.add_reader(lambda: wait_readings(waits))
    told = decode.samples("tandem_waiting_requests")
    assert (told["seat",], told["room",], told["grant",]) == (2, 1, 0)


def test_what_waits_on_a_prefill_worker_is_its_own_metric(prefill: Scene) -> None:
    assert prefill.value("tandem_prefill_queued_prompt_tokens") == 90
    assert prefill.samples("tandem_decode_queued_prompt_tokens") == {}
    assert prefill.samples("tandem_preemptions_total") == {}
