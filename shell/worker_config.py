"""Options of the workers' processes, and those that the router has too. `config` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from tandem.limits import Limits
from tandem.option_values import (
    Share,
    SizedFolder,
    host_port,
    integer,
    number,
    one_of,
    seconds,
    size_bytes,
    size_or_share,
    sized_folder,
    text,
    zmq_address,
)
from tandem.options import Section, grouped, option
from tandem.security.options import SecurityConfig

Ports: TypeAlias = tuple[tuple[str, str | None], ...]
"""Addresses that a process listens on, each with its option."""

_model = partial(option, Section.MODEL)
_address = partial(option, Section.ADDRESSES)
_compute = partial(option, Section.COMPUTE)
_memory = partial(option, Section.MEMORY)
_batches = partial(option, Section.BATCHES)
_logs = partial(option, Section.LOGS)
_internal = partial(option, Section.INTERNAL)

drain_grace_option = partial(
    option,
    Section.QUEUE,
    "drain-grace-seconds",
    30.0,
    "most time given to running requests after SIGTERM",
    seconds(0, 3600),
)

config_option = partial(
    option,
    Section.FILE,
    "config",
    None,
    "YAML file of options by name, such as `kv-memory: 2GiB`; command line and environment come before it",
    text(r".+", "a path", "FILE"),
    none_word="none",
)


def admin_option(default: str) -> Any:
    """The option of the admin port."""
    return _address(
        "admin-listen",
        default,
        "address of the admin port: metrics, a page to look at, probes; port 0 = any free one, and so is a router's "
        "default where it is taken",
        host_port(port_zero=True),
        none_word="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Options that router and workers have alike."""

    config_file: str | None = config_option()
    model: str = _model(
        "model",
        "demo",
        "checkpoint folder in Hugging Face layout, GGUF file, 'demo', or hf://OWNER/NAME[@REVISION][/FILE.gguf], which "
        "is fetched from the hub",
        text(r".+", "a path", "MODEL"),
    )
    context_tokens: int | None = _model(
        "context-tokens",
        None,
        "longest sequence, prompt and answer together; the same for all processes; model = its whole context",
        integer(1),
        none_word="model",
    )
    listen: str = _address(
        "listen", "127.0.0.1:0", "address to serve on; port 0 = any free one", host_port(port_zero=True)
    )
    drain_grace_s: float = drain_grace_option()
    admin_listen: str | None = admin_option("127.0.0.1:0")
    log_format: str = _logs("log-format", "text", "text or json", one_of("text", "json"))
    log_level: str = _logs(
        "log-level", "info", "least severe level logged", one_of("debug", "info", "warning", "error")
    )
    limits: Limits = grouped(Limits)
    security: SecurityConfig = grouped(SecurityConfig)

    @property
    def ports(self) -> Ports:
        """Returns where the process listens."""
        return (("--listen", self.listen), ("--admin-listen", self.admin_listen))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ProcessConfig):
    """Options that workers of all roles take; the engine is loaded by them."""

    router: tuple[str, ...] = _address(
        "router", (), "routers to register with; a DNS name stands for all its addresses", host_port()
    )
    advertise: str | None = _address(
        "advertise", None, "HOST:PORT at which routers reach this worker", host_port(port_zero=True), none_word="auto"
    )
    worker_id: str | None = _address(
        "worker-id",
        None,
        "stable name",
        text(r"[\w.-]{1,64}", "1 to 64 of A-Z a-z 0-9 _ . -", "NAME"),
        none_word="auto",
    )
    device: str = _compute(
        "device",
        "auto",
        "auto, cpu, cuda or cuda:I; auto is the first GPU, if there is one",
        text(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:I", "DEVICE"),
    )
    tensor_parallel: int | None = _compute(
        "tensor-parallel",
        None,
        "processes that share the model, each with a part of every layer and of the KV: 1, 2, 4 or 8, on CPUs alone; "
        "workers of any of these numbers work together, with the same tokens",
        integer(1, 8),
        none_word="off",
    )
    dtype: str = _model(
        "dtype", "auto", "element type of weights and KV", one_of("auto", "float32", "bfloat16", "float16")
    )
    model_impl: str = _model(
        "model-impl",
        "auto",
        "whose code computes the model: native, transformers' with our kernels, or native where it knows the family",
        one_of("auto", "native", "transformers"),
    )
    quantize: str | None = _model(
        "quantize",
        None,
        "round the weights of a plain checkpoint to int8, int4 or fp8 when they are loaded, all but the embedding",
        one_of("int8", "int4", "fp8"),
        none_word="none",
    )
    activations: str = _model(
        "activations",
        "auto",
        "as what long prompts meet FP8 weights on a GPU; auto: fp8 if the checkpoint was made for it, else plain",
        one_of("auto", "plain", "fp8"),
    )
    kv_dtype: str = _memory(
        "kv-dtype", "auto", "as what KV is stored; auto: as it is computed", one_of("auto", "int8", "fp8")
    )
    block_size: int = _memory("block-size", 16, "tokens per KV block", integer(1, 256))
    kv_blocks: int | None = _internal("kv-blocks", None, "blocks of the KV pool", integer(1), none_word="auto")
    kv_memory: int | Share | None = option(
        Section.MEMORY,
        "kv-memory",
        None,
        "size of the KV pool, such as 2GiB, or a share of what is free once the weights are loaded, such as 90%",
        size_or_share(),
        none_word="auto",
    )
    host_ring_bytes: int | None = _memory(
        "host-ring-memory",
        None,
        "host memory through which KV of a GPU passes to peers that it does not reach, such as 512MiB",
        size_bytes(),
        none_word="auto",
    )
    device_workers: int = _internal(
        "device-workers",
        1,
        "workers that share this one's GPU, itself included: by default each takes its part of the memory",
        integer(1, 128),
    )
    host_workers: int | None = _internal(
        "host-workers",
        None,
        "workers that share this one's machine, itself included; auto = 2, or 2 per GPU",
        integer(1, 1024),
        none_word="auto",
    )
    kv_events: tuple[str, ...] = _address(
        "kv-events",
        (),
        "publish what the prefix cache holds, as vLLM's KV events, to whoever connects to this address; at a second "
        "one subscribers ask for events that they missed; such as tcp://*:5557,tcp://*:5558",
        zmq_address,
    )
    kv_events_topic: str = _address(
        "kv-events-topic",
        "",
        "topic of KV events, as the subscribers want it",
        text(r"[!-~]{0,255}", "ASCII, no blanks"),
    )
    prefix_cache: bool = _memory("prefix-cache", True, "keep KV of ended requests for others that begin alike")
    host_cache_bytes: int = _memory(
        "host-cache-memory", 0, "host memory for KV that the pool has no room for, such as 8GiB", size_bytes(0)
    )
    disk_cache: SizedFolder | None = option(
        Section.MEMORY,
        "disk-cache",
        None,
        "folder on a local disk, and size of the file there, for KV that --host-cache-memory has no room for, such as "
        "/mnt/nvme=100GiB; nothing is left there",
        sized_folder,
        none_word="none",
    )
    chunk_tokens: int = _batches("chunk-tokens", 0, "prompt tokens per step; 0 = by device", integer(0, 1_048_576))
    max_seqs: int = _batches(
        "max-seqs", 0, "sequences in a batch; 0 = by device: 256 on a GPU of 40 GB and more, else 64", integer(0, 65536)
    )
    transport: str = _compute(
        "transport", "auto", "how KV blocks travel", one_of("auto", "shm", "tcp", "nixl", "cuda_ipc", "nccl")
    )
    attention_backend: str = _compute(
        "attention-backend", "auto", "attention kernels", one_of("auto", "flash_attn", "triton", "cpu", "reference")
    )
    cpu_tier: str | None = _internal(
        "cpu-tier", None, "instructions of a CPU's kernels: docs/kernels.md", text(r"\w+", "a tier"), none_word="auto"
    )
    threads: int | None = _compute(
        "threads", None, "CPU threads of the engine, its ranks together", integer(1, 1024), none_word="auto"
    )
    cuda_graph_seqs: int | None = _compute(
        "cuda-graphs",
        None,
        "largest decode batch run as CUDA graphs, as steps with prompts are; 0 = no step is, auto = max-seqs up to 512",
        integer(0, 1024),
        none_word="auto",
    )

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """Addresses that the worker calls, by option."""
        return tuple(("--router", router) for router in self.router)

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return self.tensor_parallel or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """`tandem prefill`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """`tandem decode`."""

    kv_port: int = _address(
        "kv-port",
        0,
        "port at which prefill workers hand over KV, on the host of --listen; 0 = any free one",
        integer(0, 65535),
    )
    local_prefill_tokens: int | None = _batches(
        "local-prefill-tokens",
        0,
        "longest prompt that the decode worker computes itself; 0 = none",
        integer(0),
        none_word="unlimited",
    )
    elastic: bool = _internal("elastic", False, "compute prompts for other workers too, beside the decodes")
    inter_token_objective_s: float | None = _batches(
        "inter-token-objective",
        None,
        "seconds between two tokens of a stream that chunks of prompts must leave; 0 = any number, auto = on elastic "
        "workers a multiple of what a step without prompts takes, else 0",
        seconds(0, 60),
        none_word="auto",
    )
    waiting_served_ratio: float = _batches(
        "waiting-served-ratio",
        3.0,
        "how many times as long as it takes alone a prompt may wait for its first token beside streams; where it would "
        "be more, chunks grow beyond the inter-token objective",
        number(1, 1000),
    )
    overlap_steps: str = _internal(
        "overlap-steps",
        "auto",
        "auto = plan and launch the next step shortly before the one that computes should end, on a CPU if neither has "
        "prompts; off = once it has ended",
        one_of("auto", "off"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig(DecodeConfig):
    """`tandem worker`."""

    elastic: bool = _internal("elastic", True, "compute prompts for other workers too, beside the decodes")
