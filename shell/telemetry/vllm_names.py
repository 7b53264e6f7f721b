"""The names under which dashboards and autoscalers made for vLLM look for the same figures.

Buckets are vLLM's where an alias is a histogram, so that queries which name one go on to work. What
a request met stands on the router, what an engine does on the workers; requests that run and
wait stand on both, each counting its own, and must not be added up across the two. Names of NIXL stand for
hand-offs over any transport: for those figures that vLLM and Tandem both have.
"""

from __future__ import annotations

from shell.telemetry import metric_names as names
from shell.telemetry.metric import Alias, one_two_five

ENGINE = "0"
"""Engine number of a process: vLLM numbers its engines."""

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_TRANSFER_BYTES = tuple(float(2**power) for power in range(11, 35, 2))
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_REQUEST_TOKENS = one_two_five(200_000)
_SOURCES = {"computed": "local_compute", "cached": "local_cache_hit", "received": "external_kv_transfer"}
_FINISHED_REASONS = {"failed": "error", "cancelled": "abort"}

ALL: tuple[Alias, ...] = (
    Alias(
        "vllm:num_requests_running",
        "Requests under way; on a worker, sequences in the batch.",
        (names.ROUTER_ACTIVE_REQUESTS, names.RUNNING_SEQS),
    ),
    Alias(
        "vllm:num_requests_waiting",
        "Requests that wait for admission; on a worker, sequences that wait.",
        (names.ROUTER_QUEUED_REQUESTS, names.WAITING_SEQS),
    ),
    Alias("vllm:kv_cache_usage_perc", "Share of KV blocks that are not free: 0 to 1.", (names.POOL_USAGE,)),
    Alias("vllm:gpu_cache_usage_perc", "The same, by its older name.", (names.POOL_USAGE,)),
    Alias(
        "vllm:cache_config_info",
        "Always 1; the labels say how the KV pool is cut.",
        (names.POOL_INFO,),
        labels=("block_size", "num_gpu_blocks"),
    ),
    Alias("vllm:prefix_cache_queries_total", "Tokens looked for in the prefix cache.", (names.PREFIX_CACHE_QUERIES,)),
    Alias("vllm:prefix_cache_hits_total", "Tokens found there.", (names.PREFIX_CACHE_HITS,)),
    Alias(
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens, by how their KV came.",
        (names.PROMPT_TOKENS_BY_SOURCE,),
        label_values=_SOURCES,
    ),
    Alias(
        "vllm:nixl_xfer_time_seconds",
        "Duration of a hand-off of KV, at its sender.",
        (names.TRANSFER_SECONDS,),
        _TRANSFER_S,
        only=("sent",),
    ),
    Alias("vllm:nixl_bytes_transferred", "Bytes of a hand-off of KV.", (names.TRANSFER_SIZE,), _TRANSFER_BYTES),
    Alias(
        "vllm:nixl_num_failed_transfers_total",
        "Hand-offs of KV that failed, at either end.",
        (names.TRANSFERS,),
        only=("failed",),
    ),
    Alias("vllm:num_preemptions_total", "Preempted sequences.", (names.PREEMPTIONS,)),
    Alias("vllm:iteration_tokens_total", "Tokens in one engine step.", (names.STEP_TOKENS,), _STEP_TOKENS),
    Alias("vllm:prompt_tokens_total", "Prompt tokens processed.", (names.PROMPT_TOKENS,)),
    Alias("vllm:prompt_tokens_cached_total", "Prompt tokens that nobody computed.", (names.CACHED_PROMPT_TOKENS,)),
    Alias("vllm:generation_tokens_total", "Tokens generated.", (names.COMPLETION_TOKENS,)),
    Alias(
        "vllm:request_success_total",
        "Requests that ended, by reason.",
        (names.REQUESTS,),
        labels=("finished_reason",),
        label_values=_FINISHED_REASONS,
    ),
    Alias("vllm:time_to_first_token_seconds", "Time to first token.", (names.TIME_TO_FIRST_TOKEN,), _TTFT_S),
    Alias("vllm:inter_token_latency_seconds", "Inter-token latency.", (names.INTER_TOKEN,), _INTER_TOKEN_S),
    Alias(
        "vllm:time_per_output_token_seconds",
        "Inter-token latency, by its older name.",
        (names.INTER_TOKEN,),
        _INTER_TOKEN_S,
    ),
    Alias(
        "vllm:request_time_per_output_token_seconds",
        "Mean gap between a request's tokens.",
        (names.REQUEST_TOKEN_SECONDS,),
        _INTER_TOKEN_S,
    ),
    Alias("vllm:e2e_request_latency_seconds", "End-to-end latency of requests.", (names.REQUEST_SECONDS,), _REQUEST_S),
    Alias("vllm:request_queue_time_seconds", "Time in queues.", (names.QUEUE_SECONDS,), _REQUEST_S),
    Alias("vllm:request_prefill_time_seconds", "Time in prefill.", (names.PREFILL_SECONDS,), _REQUEST_S),
    Alias("vllm:request_decode_time_seconds", "Time in decode.", (names.DECODE_SECONDS,), _REQUEST_S),
    Alias("vllm:request_prompt_tokens", "Prompt tokens per request.", (names.REQUEST_PROMPT_TOKENS,), _REQUEST_TOKENS),
    Alias(
        "vllm:request_generation_tokens",
        "Generated tokens per request.",
        (names.REQUEST_COMPLETION_TOKENS,),
        _REQUEST_TOKENS,
    ),
    Alias(
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of a request's longest completion: it has one.",
        (names.REQUEST_COMPLETION_TOKENS,),
        _REQUEST_TOKENS,
    ),
)
