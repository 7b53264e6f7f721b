"""Options of the workers' processes, and those that the router has too. `config` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tandem.limits import Limits
from tandem.option_values import host_port, integer, number, one_of, seconds, size_bytes, text, zmq_address
from tandem.options import grouped, option
from tandem.security.options import SecurityConfig

Ports: TypeAlias = tuple[tuple[str, str | None], ...]

model_option = partial(
    option, "model", "demo", "checkpoint folder in Hugging Face layout, GGUF file, or 'demo'", text(r".+", "a path")
)
context_option = partial(
    option,
    "context-tokens",
    None,
    "longest sequence, prompt and answer together; the same for all processes; model = its whole context",
    integer(1),
    none_word="model",
)
log_format_option = partial(option, "log-format", "text", "text or json", one_of("text", "json"))
log_level_option = partial(
    option, "log-level", "info", "least severe level logged", one_of("debug", "info", "warning", "error")
)
lease_option = partial(
    option, "lease-seconds", 5.0, "how long a silent peer is trusted; the same for all processes", seconds(0.2, 600)
)
drain_grace_option = partial(
    option, "drain-grace-seconds", 30.0, "most time given to running requests after SIGTERM", seconds(0, 3600)
)
admin_listen_option = partial(
    option,
    "admin-listen",
    "127.0.0.1:0",
    "address of the admin port: metrics, a page to look at, probes; port 0 = any free one",
    host_port(port_zero=True),
    none_word="none",
)
max_receive_option = partial(
    option, "max-receive-bytes", 8 * 1024 * 1024, "largest gRPC message taken", size_bytes(65536)
)
"""Options of router and workers alike, each a field of its own there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What both kinds of workers take."""

    model: str = model_option()
    context_tokens: int | None = context_option()
    router: tuple[str, ...] = option(
        "router", (), "routers to register with; a DNS name stands for all its addresses", host_port()
    )
    listen: str = option(
        "listen", "127.0.0.1:0", "address to serve on; port 0 = any free one", host_port(port_zero=True)
    )
    advertise: str | None = option(
        "advertise", None, "HOST:PORT at which routers reach this worker", host_port(port_zero=True), none_word="auto"
    )
    worker_id: str | None = option(
        "worker-id", None, "stable name", text(r"[\w.-]{1,64}", "1 to 64 of A-Z a-z 0-9 _ . -"), none_word="auto"
    )
    device: str = option(
        "device",
        "auto",
        "auto, cpu, cuda or cuda:I; auto is the first GPU, if there is one",
        text(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:I"),
    )
    dtype: str = option(
        "dtype", "auto", "element type of weights and KV", one_of("auto", "float32", "bfloat16", "float16")
    )
    model_impl: str = option(
        "model-impl",
        "auto",
        "whose code computes the model: native, transformers' with our kernels, or native where it knows the family",
        one_of("auto", "native", "transformers"),
    )
    quantize: str | None = option(
        "quantize",
        None,
        "round the weights of a plain checkpoint to int8, int4 or fp8 when they are loaded, all but the embedding",
        one_of("int8", "int4", "fp8"),
        none_word="none",
    )
    kv_dtype: str = option(
        "kv-dtype", "auto", "as what KV is stored; auto: as it is computed", one_of("auto", "int8", "fp8")
    )
    block_size: int = option("block-size", 16, "tokens per KV block", integer(1, 256))
    kv_blocks: int | None = option("kv-blocks", None, "blocks of the KV pool", integer(1), none_word="auto")
    kv_memory_bytes: int | None = option(
        "kv-memory", None, "size of the KV pool, such as 2GiB", size_bytes(), none_word="auto"
    )
    host_ring_bytes: int | None = option(
        "host-ring-memory",
        None,
        "host memory through which KV of a GPU passes to peers that it does not reach, such as 512MiB",
        size_bytes(),
        none_word="auto",
    )
    device_workers: int = option(
        "device-workers",
        2,
        "workers that share this one's GPU, itself included: by default each takes its part of the memory",
        integer(1, 128),
    )
    host_workers: int | None = option(
        "host-workers",
        None,
        "workers that share this one's machine, itself included; auto = 2, or 2 per GPU",
        integer(1, 1024),
        none_word="auto",
    )
    kv_events: str | None = option(
        "kv-events",
        None,
        "publish what the prefix cache holds, as vLLM's KV events, to whoever connects to this address; such as "
        "tcp://*:5557",
        zmq_address,
        none_word="none",
    )
    kv_events_replay: str | None = option(
        "kv-events-replay",
        None,
        "address at which subscribers ask for KV events that they missed; such as tcp://*:5558",
        zmq_address,
        none_word="none",
    )
    kv_events_topic: str = option(
        "kv-events-topic",
        "",
        "topic of KV events, as the subscribers want it",
        text(r"[!-~]{0,255}", "ASCII, no blanks"),
    )
    prefix_cache: bool = option("prefix-cache", True, "keep KV of ended requests for others that begin alike")
    host_cache_bytes: int = option(
        "host-cache-memory", 0, "host memory for KV that the pool has no room for, such as 8GiB", size_bytes(0)
    )
    disk_cache: str | None = option(
        "disk-cache",
        None,
        "folder on a local disk for KV that --host-cache-memory has no room for; nothing is left there",
        text(r".+", "a folder"),
        none_word="none",
    )
    disk_cache_bytes: int = option(
        "disk-cache-memory", 0, "size of the file that --disk-cache has made there, such as 100GiB", size_bytes(0)
    )
    chunk_tokens: int = option("chunk-tokens", 0, "prompt tokens per step; 0 = by device", integer(0, 1_048_576))
    max_seqs: int = option(
        "max-seqs", 0, "sequences in a batch; 0 = by device: 256 on a GPU of 40 GB and more, else 64", integer(0, 65536)
    )
    transport: str = option(
        "transport", "auto", "how KV blocks travel", one_of("auto", "shm", "tcp", "nixl", "cuda_ipc", "nccl")
    )
    attention_backend: str = option(
        "attention-backend", "auto", "attention kernels", one_of("auto", "flash_attn", "triton", "cpu", "reference")
    )
    cpu_tier: str | None = option(
        "cpu-tier", None, "instructions of a CPU's kernels: docs/kernels.md", text(r"\w+", "a tier"), none_word="auto"
    )
    threads: int | None = option("threads", None, "CPU threads of the engine", integer(1, 1024), none_word="auto")
    lease_s: float = lease_option()
    drain_grace_s: float = drain_grace_option()
    max_receive_bytes: int = max_receive_option()
    admin_listen: str | None = admin_listen_option()
    log_format: str = log_format_option()
    log_level: str = log_level_option()
    limits: Limits = grouped(Limits)
    security: SecurityConfig = grouped(SecurityConfig)

    @property
    def ports(self) -> Ports:
        """Where it listens, by option."""
        return (("--listen", self.listen), ("--admin-listen", self.admin_listen))

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """Whom it calls, by option."""
        return tuple(("--router", router) for router in self.router)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """`tandem prefill`."""

    overlap: bool = option("overlap", True, "send a chunk's blocks while the next chunk computes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """`tandem decode`."""

    kv_port: int = option(
        "kv-port",
        0,
        "port at which prefill workers hand over KV, on the host of --listen; 0 = any free one",
        integer(0, 65535),
    )
    local_prefill_tokens: int | None = option(
        "local-prefill-tokens",
        0,
        "longest prompt that the decode worker computes itself; 0 = none",
        integer(0),
        none_word="unlimited",
    )
    elastic: bool = option("elastic", False, "compute prompts for other workers too, beside the decodes")
    inter_token_objective_s: float | None = option(
        "inter-token-objective",
        None,
        "seconds between two tokens of a stream that chunks of prompts must leave; 0 = any number, auto = on elastic "
        "workers a multiple of what a step without prompts takes, else 0",
        seconds(0, 60),
        none_word="auto",
    )
    waiting_served_ratio: float = option(
        "waiting-served-ratio",
        3.0,
        "how many times as long as it takes alone a prompt may wait for its first token beside streams; where it would "
        "be more, chunks grow beyond the inter-token objective",
        number(1, 1000),
    )
    overlap_steps: str = option(
        "overlap-steps",
        "auto",
        "auto = plan and launch the next decode step shortly before the one that computes should end; off = once it "
        "has ended",
        one_of("auto", "off"),
    )
    cuda_graph_seqs: int | None = option(
        "cuda-graphs",
        None,
        "largest decode batch run as CUDA graphs; 0 = none, auto = max-seqs up to 256",
        integer(0, 1024),
        none_word="auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig(DecodeConfig):
    """`tandem worker`."""

    elastic: bool = option("elastic", True, "compute prompts for other workers too, beside the decodes")
