"""Every metric that Tandem's processes expose under its own name; `vllm_names` has the aliases.

The one place where names, texts, labels and buckets are written. Units are in the names:
seconds, bytes, tokens, ratios from 0 to 1. The table in docs/observability.md is checked
against this file, and so is every dashboard, rule and autoscaler under deploy/.
"""

from __future__ import annotations

from functools import partial

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

_everywhere = partial(Metric, on=EVERYWHERE)
_router = partial(Metric, on=(Process.ROUTER,))
_latency = partial(Metric, on=(Process.ROUTER,), buckets=LATENCY_S)
_worker = partial(Metric, on=WORKERS)
_decoding = partial(Metric, on=DECODING)
_prefill = partial(Metric, on=(Process.PREFILL,))

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

BUILD_INFO = _everywhere(
    "tandem_build_info",
    "Always 1; the labels say what runs here.",
    labels={"version": (), "role": (), "model": (), "worker_id": ()},
)
SERVING = _everywhere("tandem_serving", "1 while health tells SERVING.")
DRAINING = _everywhere("tandem_draining", "1 while no new work is taken because the process drains.")
CERTIFICATE_EXPIRY = _everywhere(
    "tandem_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which this port's certificate ends; nothing without TLS.",
)
LOOP_LAG = _everywhere("tandem_event_loop_lag_seconds", "How late a timer of the event loop fires.", buckets=LATENCY_S)
LOG_LINES_DROPPED = _everywhere("tandem_log_lines_dropped_total", "Log lines that standard error did not take in time.")
GRPC_CALLS = _everywhere(
    "tandem_grpc_server_calls_total",
    "gRPC calls that this server ended, by status code.",
    labels={"service": (), "method": (), "code": ()},
)
GRPC_IN_FLIGHT = _everywhere(
    "tandem_grpc_server_calls_in_flight",
    "gRPC calls that this server is handling.",
    labels={"service": (), "method": ()},
)

# --- router ---

HTTP_REQUESTS = _router(
    "tandem_http_requests_total",
    "HTTP requests that the router answered, by route and status; cancelled = the caller left.",
    labels={"route": (), "code": ()},
)
HTTP_IN_FLIGHT = _router(
    "tandem_http_requests_in_flight", "HTTP requests that the router is answering, by route.", labels={"route": ()}
)

OUTCOMES = (*(str(each) for each in FinishReason), "failed", "cancelled")
WORKER_STATES = ("ready", "set_apart", "set_aside", "draining", "stalled", "unreachable")

ROUTER_QUEUED_REQUESTS = _router("tandem_router_queued_requests", "Requests that wait for admission at the router.")
ROUTER_QUEUED_TOKENS = _router("tandem_router_queued_prompt_tokens", "Prompt tokens of the requests that wait there.")
ROUTER_ACTIVE_REQUESTS = _router("tandem_router_active_requests", "Requests that were admitted and have not ended.")
ROUTER_MAX_ACTIVE = _router("tandem_router_max_active_requests", "Requests that may be under way at a time.")
ROUTER_MAX_QUEUED = _router("tandem_router_max_queued_requests", "Requests that may wait for admission.")
ROUTER_WORKERS = _router(
    "tandem_router_workers",
    "Registered workers; ready ones get new work, or else those set aside; set apart = another model or layout.",
    labels={"worker_role": Role, "state": WORKER_STATES},
)
ROUTER_PAIRS_SET_ASIDE = _router(
    "tandem_router_pairs_set_aside", "Pairs that get no new work: hand-offs between them failed."
)
REQUESTS = _router("tandem_requests_total", "Requests that ended and were not refused.", labels={"outcome": OUTCOMES})
REQUEST_FAILURES = _router(
    "tandem_request_failures_total",
    "Requests that failed after admission.",
    labels={"reason": (*_TRY_FAILS, Reason.MODEL_CHANGED, Reason.INVALID_FIELD, Reason.DEADLINE_EXCEEDED)},
)
REQUESTS_REFUSED = _router(
    "tandem_requests_refused_total", "Requests refused before they ran.", labels={"reason": _REFUSALS}
)
PLACEMENTS = _router(
    "tandem_request_placements_total",
    "Pairs of workers chosen; local = the decode worker computes the prompt; handed_over = a running request moves.",
    labels={"path": ("disaggregated", "local", "handed_over")},
)
PLACEMENT_REASONS = _router(
    "tandem_placement_total",
    "Placements by why the prompt is computed by the decode worker (local), another (remote), or none (handed_over).",
    labels={"reason": PlacementReason},
)
PREFIX_PLACEMENTS = _router(
    "tandem_request_prefix_placements_total",
    "Placements by where KV of the request's first tokens seemed to be: a chosen worker, only others, or nowhere.",
    labels={"at": PrefixAt},
)
FAILED_TRIES = _router(
    "tandem_request_moves_total",
    "Tries that failed on one pair of workers, by the role of the worker at fault.",
    labels={"worker_role": Role, "reason": _TRY_FAILS},
)
PROMPT_TOKENS = _router("tandem_prompt_tokens_total", "Prompt tokens of the requests whose prompt was computed.")
CACHED_PROMPT_TOKENS = _router("tandem_cached_prompt_tokens_total", "Those of them whose KV a worker had already.")
COMPLETION_TOKENS = _router("tandem_completion_tokens_total", "Tokens generated for clients.")
TIME_TO_FIRST_TOKEN = _latency("tandem_time_to_first_token_seconds", "A request's arrival to its first token.")
INTER_TOKEN = _router(
    "tandem_inter_token_seconds", "Gap between a request's tokens as they reach the router.", buckets=STEP_S
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
    "tandem_request_transfer_seconds", "Time that the sender of a request's KV was busy."
)
REQUEST_TOKEN_SECONDS = _router(
    "tandem_request_time_per_output_token_seconds",
    "Mean gap between the tokens of a finished request that has several.",
    buckets=STEP_S,
)
DECODE_SECONDS = _latency("tandem_request_decode_seconds", "A finished request's first token to its last.")
REQUEST_PROMPT_TOKENS = _router("tandem_request_prompt_tokens", "Prompt tokens of a request.", buckets=TOKENS)
REQUEST_COMPLETION_TOKENS = _router(
    "tandem_request_completion_tokens", "Tokens generated for a finished request.", buckets=TOKENS
)

# --- workers ---

TIERS = ("host", "disk")
"""Where KV blocks go that the pool has no room for."""

RUNNING_SEQS = _worker("tandem_running_seqs", "Sequences in the batch.")
WAITING_SEQS = _worker("tandem_waiting_seqs", "Sequences that wait for room or for their turn.")
WAITING_REQUESTS = _worker(
    "tandem_waiting_requests",
    "Requests that get no tokens now, by what they wait for.",
    labels={"reason": tuple(WaitReason)},
)
PREFILL_QUEUED_TOKENS = _prefill(
    "tandem_prefill_queued_prompt_tokens", "Prompt tokens that this worker has yet to compute."
)
DECODE_QUEUED_TOKENS = _decoding(
    "tandem_decode_queued_prompt_tokens",
    "Prompt tokens that wait for room on this worker, or that it has yet to compute.",
)
PROMPT_RATE = _worker(
    "tandem_prompt_tokens_per_second",
    "Prompt tokens computed per second, measured; while sequences decode, what the step objective leaves for them.",
)
DECODE_STEP_AVERAGE = _decoding("tandem_decode_step_average_seconds", "Moving average of steps without prompts.")
STEP_OBJECTIVE = _decoding(
    "tandem_step_objective_seconds",
    "Longest step that the inter-token objective allows while sequences decode; 0 before it is known.",
)
POOL_BLOCKS = _worker("tandem_kv_pool_blocks", "KV blocks by state.", labels={"state": ()})
POOL_USAGE = _worker("tandem_kv_pool_usage_ratio", "Share of KV blocks that are neither free nor cached.")
POOL_UNUSED_SLOTS = _worker("tandem_kv_pool_unused_slots", "Token slots of live KV blocks that hold no token.")
POOL_INFO = _worker(
    "tandem_kv_pool_info", "Always 1; the labels say how the KV pool is cut.", labels={"block_tokens": (), "blocks": ()}
)
POOL_BLOCK_TOKENS = _worker("tandem_kv_pool_block_tokens", "Token slots of one KV block.")
TRANSFERS_LIVE = _worker("tandem_transfers_live", "Hand-offs of KV under way.")
PREFIX_CACHE_QUERIES = _worker("tandem_prefix_cache_queries_total", "Tokens whose KV was looked for in the cache.")
PREFIX_CACHE_HITS = _worker("tandem_prefix_cache_hits_total", "Those of them whose KV was found there.")
PROMPT_TOKENS_BY_SOURCE = _worker(
    "tandem_worker_prompt_tokens_total",
    "Tokens to run before the next one, by how their KV came: computed here, found in the cache, handed over.",
    labels={"source": ("computed", "cached", "received")},
)
PREFIX_CACHE_EVICTED = _worker("tandem_prefix_cache_evicted_blocks_total", "Cached KV blocks freed for others.")
PREFIX_CACHE_STORED = _worker(
    "tandem_prefix_cache_stored_blocks_total", "Evicted KV blocks kept outside the pool.", labels={"tier": TIERS}
)
PREFIX_CACHE_LOADED = _worker(
    "tandem_prefix_cache_loaded_blocks_total", "KV blocks that came back from there.", labels={"tier": TIERS}
)
PREFIX_CACHE_FAILED = _worker(
    "tandem_prefix_cache_failed_blocks_total",
    "KV blocks lost there: an error, or other bytes than were stored.",
    labels={"tier": ("disk",)},
)
ENGINE_STEPS = _worker("tandem_engine_steps_total", "Steps that the engine has made.")
CUDA_GRAPHS = _worker(
    "tandem_cuda_graphs",
    "Shapes of steps that have a CUDA graph, and shapes that were refused one at start; nothing on a CPU.",
    labels={"state": ("captured", "refused")},
)
CUDA_GRAPH_STEPS = _worker(
    "tandem_cuda_graph_steps_total",
    "Steps that ran as a CUDA graph, by tokens with padding; the others were launched kernel by kernel.",
    labels={"tokens": (), "kind": ("decode", "prompt")},
)
STEP_SECONDS = _worker(
    "tandem_step_seconds",
    "Duration of one engine step; mixed = prompts and decoding sequences in one batch.",
    labels={"kind": ("prefill", "decode", "mixed")},
    buckets=STEP_S,
)
STEP_SEQS = _worker("tandem_step_seqs", "Sequences in one engine step: the batch size.", buckets=SEQS)
STEP_TOKENS = _worker(
    "tandem_step_tokens", "Tokens computed in one engine step, prompt and decoded.", buckets=one_two_five(20_000)
)
COMPUTED_PROMPT_TOKENS = _worker(
    "tandem_computed_prompt_tokens_total", "Prompt tokens computed here, recomputed ones again."
)
SAMPLED_TOKENS = _worker("tandem_sampled_tokens_total", "Tokens drawn here.")
PREEMPTIONS = _decoding(
    "tandem_preemptions_total",
    "Sequences that gave up their KV blocks and will be computed again, but for what is cached.",
)
MOVES = _worker(
    "tandem_hand_overs_total",
    "Running requests that moved to another decode worker, with their KV, by why: this one drains or has too many.",
    labels={"reason": tuple(MoveReason)},
)
SEQUENCES = _worker(
    "tandem_sequences_total",
    "Sequences that left; ended = done, or no longer wanted.",
    labels={"outcome": ("ended", "failed")},
)
SEQUENCE_FAILURES = _worker(
    "tandem_sequence_failures_total",
    "Sequences that failed here.",
    labels={
        "reason": (
            *(*_TRANSFER_FAILS, Reason.QUEUE_FULL, Reason.DRAINING, Reason.DEADLINE_EXCEEDED, Reason.INTERNAL),
            *(Reason.INVALID_FIELD, Reason.OPTION_NOT_SUPPORTED, Reason.PREFIX_NOT_HELD),
        )
    },
)
SEQUENCE_WAIT = _worker(
    "tandem_sequence_wait_seconds", "A sequence's arrival here to its first step.", buckets=LATENCY_S
)
TRANSFERS = _worker(
    "tandem_transfers_total",
    "Hand-offs of KV that ended; withdrawn = the request was gone.",
    labels={"outcome": ("committed", "failed", "withdrawn")},
)
TRANSFER_FAILURES = _worker(
    "tandem_transfer_failures_total", "Hand-offs of KV that failed.", labels={"reason": _TRANSFER_FAILS}
)
TRANSPORTS_BARRED = _worker(
    "tandem_transports_barred_total",
    "Decode workers towards which this worker gave a transport up, because checksums failed twice in a row.",
    labels={"transport": ()},
)
TRANSFER_BYTES = _worker("tandem_transfer_bytes_total", "Bytes of KV transferred, counted by the sender.")
TRANSFER_SIZE = _worker(
    "tandem_transfer_size_bytes",
    "Bytes of KV of one hand-off, counted by the sender.",
    buckets=tuple(float(2**power) for power in range(11, 35, 2)),
)
TRANSFER_SECONDS = _worker(
    "tandem_transfer_seconds",
    "One hand-off of KV: sent = the sender's busy time, received = the receiver's time since the ticket was shown.",
    labels={"side": ("sent", "received")},
    buckets=(0.0005, *LATENCY_S),
)

BLOCK_STATES = tuple(dict.fromkeys((*(str(state) for state in BlockState), "cached")))
"""Fields of PoolCounts."""

ALL: tuple[Metric, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""In the order above."""
