"""Every metric that Tandem's processes expose under its own name; `vllm_names` has the aliases.

The one place where names, texts, labels and buckets are written. Units are in the names:
seconds, bytes, tokens, ratios from 0 to 1. The table in docs/observability.md is checked
against this file, and so is every dashboard, rule and autoscaler under deploy/.
"""

from __future__ import annotations

from shell.telemetry.metric import DECODING, EVERYWHERE, WORKERS, Metric, Process, one_two_five
from tandem.errors import Reason
from tandem.lifecycle import BlockState
from tandem.types import FinishReason, MoveReason, PlacementReason, PrefixAt, Role, WaitReason

LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
STEP_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""Finer where steps, and so the gaps between tokens, lie."""
TOKENS = one_two_five(200_000)
SEQS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

_ROUTER = (Process.ROUTER,)
_PREFILL = (Process.PREFILL,)


def _latency(name: str, text: str, on: tuple[Process, ...] = _ROUTER) -> Metric:
    return Metric(name, text, on, buckets=LATENCY_S)


_LOST_ON_THE_WAY = (
    *(Reason.TRANSFER_FAILED, Reason.TICKET_REFUSED, Reason.CHECKSUM_MISMATCH),
    *(Reason.FRAME_ERROR, Reason.PEER_LOST),
)
_TRANSFER_FAILS = (*_LOST_ON_THE_WAY, Reason.HANDSHAKE_MISMATCH)
_TRY_FAILS = (
    *(Reason.NO_CAPABLE_WORKER, Reason.WORKER_LOST, Reason.DRAINING, Reason.QUEUE_FULL, *_TRANSFER_FAILS),
    *(Reason.INVALID_OUTPUT, Reason.INTERNAL),
)
"""Why a try on one pair of workers fails where another pair may do better."""

_REFUSALS = (
    *(Reason.INVALID_FIELD, Reason.OPTION_NOT_SUPPORTED, Reason.MODEL_NOT_FOUND),
    *(Reason.QUEUE_FULL, Reason.DRAINING, Reason.DEADLINE_EXCEEDED, Reason.INTERNAL),
)

# --- every process ---

BUILD_INFO = Metric(
    "tandem_build_info",
    "Always 1; the labels say what runs here.",
    EVERYWHERE,
    {"version": (), "role": (), "model": (), "worker_id": ()},
)
SERVING = Metric("tandem_serving", "1 while health tells SERVING.", EVERYWHERE)
DRAINING = Metric("tandem_draining", "1 while no new work is taken because the process drains.", EVERYWHERE)
CERTIFICATE_EXPIRY = Metric(
    "tandem_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate of this port ends; nothing without TLS.",
    EVERYWHERE,
)
LOOP_LAG = _latency("tandem_event_loop_lag_seconds", "How late a timer of the event loop fires.", EVERYWHERE)
LOG_LINES_DROPPED = Metric(
    "tandem_log_lines_dropped_total", "Lines of the log that standard error did not take in time.", EVERYWHERE
)
GRPC_CALLS = Metric(
    "tandem_grpc_server_calls_total",
    "gRPC calls that this server ended, by status code.",
    EVERYWHERE,
    {"service": (), "method": (), "code": ()},
)
GRPC_IN_FLIGHT = Metric(
    "tandem_grpc_server_calls_in_flight",
    "gRPC calls that this server is handling.",
    EVERYWHERE,
    {"service": (), "method": ()},
)

# --- router ---

OUTCOMES = (*(str(each) for each in FinishReason), "failed", "cancelled")
WORKER_STATES = ("ready", "set_apart", "set_aside", "draining", "stalled", "unreachable")

ROUTER_QUEUED_REQUESTS = Metric(
    "tandem_router_queued_requests", "Requests that wait for admission at the router.", _ROUTER
)
ROUTER_QUEUED_TOKENS = Metric(
    "tandem_router_queued_prompt_tokens", "Prompt tokens of the requests that wait for admission.", _ROUTER
)
ROUTER_ACTIVE_REQUESTS = Metric(
    "tandem_router_active_requests", "Requests that were admitted and have not ended.", _ROUTER
)
ROUTER_MAX_ACTIVE = Metric("tandem_router_max_active_requests", "Requests that may be under way at a time.", _ROUTER)
ROUTER_MAX_QUEUED = Metric("tandem_router_max_queued_requests", "Requests that may wait for admission.", _ROUTER)
ROUTER_WORKERS = Metric(
    "tandem_router_workers",
    "Workers registered with this router; those that are ready get new work, and if there are none, those set aside; "
    "those set apart have another model or KV layout.",
    _ROUTER,
    {"worker_role": Role, "state": WORKER_STATES},
)
ROUTER_PAIRS_SET_ASIDE = Metric(
    "tandem_router_pairs_set_aside",
    "Pairs of workers that get no new work, for hand-offs between them failed.",
    _ROUTER,
)
REQUESTS = Metric(
    "tandem_requests_total", "Requests that ended, those left out that were refused.", _ROUTER, {"outcome": OUTCOMES}
)
REQUEST_FAILURES = Metric(
    "tandem_request_failures_total",
    "Requests that failed after admission.",
    _ROUTER,
    {"reason": (*_TRY_FAILS, Reason.MODEL_CHANGED, Reason.INVALID_FIELD, Reason.DEADLINE_EXCEEDED)},
)
REQUESTS_REFUSED = Metric(
    "tandem_requests_refused_total", "Requests that were turned away before they ran.", _ROUTER, {"reason": _REFUSALS}
)
PLACEMENTS = Metric(
    "tandem_request_placements_total",
    "Pairs of workers chosen; local = the decode worker computes the prompt too; handed_over = another decode worker "
    "takes over what runs, with its KV.",
    _ROUTER,
    {"path": ("disaggregated", "local", "handed_over")},
)
PLACEMENT_REASONS = Metric(
    "tandem_placement_total",
    "Placements by why the prompt is computed where it is: by the worker that decodes it (local), by another one "
    "(remote), or not at all because it is there (handed_over).",
    _ROUTER,
    {"reason": PlacementReason},
)
PREFIX_PLACEMENTS = Metric(
    "tandem_request_prefix_placements_total",
    "Placements by where KV of the request's first tokens seemed to be: on a worker that was chosen, only on others, "
    "or nowhere.",
    _ROUTER,
    {"at": PrefixAt},
)
FAILED_TRIES = Metric(
    "tandem_request_moves_total",
    "Tries that failed on one pair of workers, by the role of the worker at fault.",
    _ROUTER,
    {"worker_role": Role, "reason": _TRY_FAILS},
)
PROMPT_TOKENS = Metric(
    "tandem_prompt_tokens_total", "Prompt tokens of the requests whose prompt was computed.", _ROUTER
)
CACHED_PROMPT_TOKENS = Metric(
    "tandem_cached_prompt_tokens_total", "Those of them whose KV a worker had already: nobody computed it.", _ROUTER
)
COMPLETION_TOKENS = Metric("tandem_completion_tokens_total", "Tokens generated for clients.", _ROUTER)
TIME_TO_FIRST_TOKEN = _latency("tandem_time_to_first_token_seconds", "A request's arrival to its first token.")
INTER_TOKEN = Metric(
    "tandem_inter_token_seconds",
    "Gap between one token of a request and the next, as they reach the router.",
    _ROUTER,
    buckets=STEP_S,
)
REQUEST_SECONDS = _latency("tandem_request_seconds", "A finished request's arrival to its last token.")
WITHOUT_TOKEN_SECONDS = _latency(
    "tandem_request_without_token_seconds",
    "Arrival to the end of a request that broke off before its first token: given up, failed, or not admitted.",
)
ADMISSION_SECONDS = _latency("tandem_request_admission_seconds", "Wait for admission at the router.")
QUEUE_SECONDS = _latency(
    "tandem_request_queue_seconds",
    "A request's arrival to the start of its prompt's computation: admission, room on a decode worker, prefill queue.",
)
PREFILL_SECONDS = _latency("tandem_request_prefill_seconds", "Computation of a request's prompt.")
REQUEST_TRANSFER_SECONDS = _latency(
    "tandem_request_transfer_seconds", "Time that the sender of a request's KV spent on moving it."
)
DECODE_SECONDS = _latency("tandem_request_decode_seconds", "A finished request's first token to its last.")
REQUEST_PROMPT_TOKENS = Metric("tandem_request_prompt_tokens", "Prompt tokens of a request.", _ROUTER, buckets=TOKENS)
REQUEST_COMPLETION_TOKENS = Metric(
    "tandem_request_completion_tokens", "Tokens generated for a finished request.", _ROUTER, buckets=TOKENS
)

# --- workers ---

TIERS = ("host", "disk")
"""Where KV blocks go that the pool has no room for."""

RUNNING_SEQS = Metric("tandem_running_seqs", "Sequences in the batch.", WORKERS)
WAITING_SEQS = Metric("tandem_waiting_seqs", "Sequences that wait for room or for their turn.", WORKERS)
WAITING_REQUESTS = Metric(
    "tandem_waiting_requests",
    "Requests that are held here and get no tokens now, by what they wait for.",
    WORKERS,
    {"reason": tuple(WaitReason)},
)
PREFILL_QUEUED_TOKENS = Metric(
    "tandem_prefill_queued_prompt_tokens", "Prompt tokens on this prefill worker that are not computed yet.", _PREFILL
)
DECODE_QUEUED_TOKENS = Metric(
    "tandem_decode_queued_prompt_tokens",
    "Prompt tokens of sequences that wait for room on this decode worker, or that it has yet to compute.",
    DECODING,
)
PROMPT_RATE = Metric(
    "tandem_prompt_tokens_per_second",
    "Prompt tokens that are computed here per second, measured; while sequences decode, what the objective of a step "
    "leaves for prompts.",
    WORKERS,
)
DECODE_STEP_AVERAGE = Metric(
    "tandem_decode_step_average_seconds", "Moving average of the steps that compute no prompt.", DECODING
)
STEP_OBJECTIVE = Metric(
    "tandem_step_objective_seconds",
    "Longest step that the inter-token objective allows while sequences decode; 0 before it is known.",
    DECODING,
)
POOL_BLOCKS = Metric("tandem_kv_pool_blocks", "KV blocks by state.", WORKERS, {"state": ()})
POOL_USAGE = Metric(
    "tandem_kv_pool_usage_ratio", "KV blocks that are neither free nor cached, as a share of all: 0 to 1.", WORKERS
)
POOL_UNUSED_SLOTS = Metric(
    "tandem_kv_pool_unused_slots", "Token slots of live KV blocks that hold no token: the pool's waste.", WORKERS
)
POOL_INFO = Metric(
    "tandem_kv_pool_info",
    "Always 1; the labels say how the KV pool is cut.",
    WORKERS,
    {"block_tokens": (), "blocks": ()},
)
POOL_BLOCK_TOKENS = Metric("tandem_kv_pool_block_tokens", "Token slots of one KV block.", WORKERS)
TRANSFERS_LIVE = Metric("tandem_transfers_live", "Hand-offs of KV under way.", WORKERS)
PREFIX_CACHE_QUERIES = Metric(
    "tandem_prefix_cache_queries_total", "Tokens of sequences whose KV was looked for in this worker's cache.", WORKERS
)
PREFIX_CACHE_HITS = Metric("tandem_prefix_cache_hits_total", "Those of them whose KV was found there.", WORKERS)
PREFIX_CACHE_EVICTED = Metric(
    "tandem_prefix_cache_evicted_blocks_total", "Cached KV blocks that were made free for others.", WORKERS
)
PREFIX_CACHE_STORED = Metric(
    "tandem_prefix_cache_stored_blocks_total",
    "Evicted KV blocks that were kept outside the pool.",
    WORKERS,
    {"tier": TIERS},
)
PREFIX_CACHE_LOADED = Metric(
    "tandem_prefix_cache_loaded_blocks_total", "KV blocks that came back from there.", WORKERS, {"tier": TIERS}
)
PREFIX_CACHE_FAILED = Metric(
    "tandem_prefix_cache_failed_blocks_total",
    "KV blocks that were lost there: an error, or other bytes than were stored.",
    WORKERS,
    {"tier": ("disk",)},
)
ENGINE_STEPS = Metric("tandem_engine_steps_total", "Steps that the engine has made.", WORKERS)
STEP_SECONDS = Metric(
    "tandem_step_seconds",
    "Duration of one engine step; mixed = prompt tokens and decoding sequences in one batch.",
    WORKERS,
    {"kind": ("prefill", "decode", "mixed")},
    STEP_S,
)
STEP_SEQS = Metric("tandem_step_seqs", "Sequences in one engine step: the batch size.", WORKERS, buckets=SEQS)
STEP_TOKENS = Metric(
    "tandem_step_tokens",
    "Tokens computed in one engine step, prompt and decoded.",
    WORKERS,
    buckets=one_two_five(20_000),
)
COMPUTED_PROMPT_TOKENS = Metric(
    "tandem_computed_prompt_tokens_total", "Prompt tokens computed here; again when a sequence is recomputed.", WORKERS
)
SAMPLED_TOKENS = Metric("tandem_sampled_tokens_total", "Tokens drawn here.", WORKERS)
PREEMPTIONS = Metric(
    "tandem_preemptions_total",
    "Sequences that gave up their KV blocks, to go on later with what the cache still knows of them.",
    DECODING,
)
MOVES = Metric(
    "tandem_hand_overs_total",
    "Running requests that went on at another decode worker, with their KV: as this one drains, or its pool is too "
    "small for them all.",
    WORKERS,
    {"reason": tuple(MoveReason)},
)
SEQUENCES = Metric(
    "tandem_sequences_total",
    "Sequences that left this worker; ended = done, or no longer wanted.",
    WORKERS,
    {"outcome": ("ended", "failed")},
)
SEQUENCE_FAILURES = Metric(
    "tandem_sequence_failures_total",
    "Sequences that failed here.",
    WORKERS,
    {
        "reason": (
            *(*_TRANSFER_FAILS, Reason.QUEUE_FULL, Reason.DRAINING, Reason.DEADLINE_EXCEEDED, Reason.INTERNAL),
            *(Reason.INVALID_FIELD, Reason.OPTION_NOT_SUPPORTED, Reason.PREFIX_NOT_HELD),
        )
    },
)
SEQUENCE_WAIT = _latency("tandem_sequence_wait_seconds", "A sequence's arrival here to its first step.", WORKERS)
TRANSFERS = Metric(
    "tandem_transfers_total",
    "Hand-offs of KV that ended here; withdrawn = the request was gone first.",
    WORKERS,
    {"outcome": ("committed", "failed", "withdrawn")},
)
TRANSFER_FAILURES = Metric(
    "tandem_transfer_failures_total", "Hand-offs of KV that failed.", WORKERS, {"reason": _TRANSFER_FAILS}
)
TRANSFER_BYTES = Metric("tandem_transfer_bytes_total", "Bytes of KV handed over, counted by the sender.", WORKERS)
TRANSFER_SECONDS = Metric(
    "tandem_transfer_seconds",
    "One hand-off of KV: the sender's time spent on moving it, the receiver's from the ticket's showing on.",
    WORKERS,
    buckets=(0.0005, *LATENCY_S),
)

BLOCK_STATES = tuple(dict.fromkeys((*(str(state) for state in BlockState), "cached")))
"""Fields of PoolCounts."""

ALL: tuple[Metric, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""In the order above."""
