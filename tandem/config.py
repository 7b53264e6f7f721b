"""The config tree of each process, frozen; the sole reader of the environment.

Every option is one field here (or in `limits`). `load` takes it from argv, then from
`TANDEM_<OPTION>`, then its default; a bad value or an unknown `TANDEM_` key raises ConfigError.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from tandem.limits import Limits
from tandem.option_values import host_port, integer, number, one_of, seconds, size_bytes, text, zmq_address
from tandem.options import add_arguments, argv_of, check_known, grouped, load_options, option
from tandem.security.options import ClientSecurityConfig, SecurityConfig

__all__ = [
    "DEFAULT_ADDRESS",
    "ClientConfig",
    "ClientSecurityConfig",
    "DecodeConfig",
    "ElasticConfig",
    "Limits",
    "PrefillConfig",
    "RouterConfig",
    "SecurityConfig",
    "ServeConfig",
    "WorkerConfig",
    "add_arguments",
    "argv_of",
    "environment",
    "load",
    "quiet_grpc",
    "show_gpus",
]

DEFAULT_ADDRESS = "127.0.0.1:50051"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

T = TypeVar("T")

Ports: TypeAlias = tuple[tuple[str, str | None], ...]


_model = partial(
    option, "model", "demo", "checkpoint folder in Hugging Face layout, GGUF file, or 'demo'", text(r".+", "a path")
)
_log_format = partial(option, "log-format", "text", "text or json", one_of("text", "json"))
_log_level = partial(
    option, "log-level", "info", "least severe level logged", one_of("debug", "info", "warning", "error")
)
_lease = partial(
    option, "lease-seconds", 5.0, "how long a silent peer is trusted; the same for all processes", seconds(0.2, 600)
)
_drain_grace = partial(
    option, "drain-grace-seconds", 30.0, "most time given to running requests after SIGTERM", seconds(0, 3600)
)
_admin_listen = partial(
    option,
    "admin-listen",
    "127.0.0.1:0",
    "address of the admin port: metrics, a page to look at, probes; port 0 = any free one",
    host_port(port_zero=True),
    none_word="none",
)
_max_receive = partial(option, "max-receive-bytes", 8 * 1024 * 1024, "largest gRPC message taken", size_bytes(65536))
"""Options of router and workers alike, each a field of its own there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """`tandem router`."""

    model: str = _model()
    served_model_names: tuple[str, ...] = option(
        "served-model-name",
        (),
        "what clients call the model, the first is told them; none: the name of its folder",
        text(r"\S{1,256}", "1 to 256 characters without spaces"),
    )
    listen: str = option("listen", DEFAULT_ADDRESS, "address to serve on", host_port(port_zero=True))
    max_queued_requests: int = option(
        "max-queued-requests", 1024, "requests that may wait for admission", integer(0, 1_000_000)
    )
    max_queued_tokens: int = option(
        "max-queued-tokens", 4_194_304, "prompt tokens that may wait for admission", integer(1)
    )
    max_active_requests: int = option("max-active-requests", 256, "requests under way at a time", integer(1, 1_000_000))
    max_unread_bytes: int = option(
        "max-unread-bytes",
        256 * 1024 * 1024,
        "memory of answers that callers have not read; beyond it the request with the most is ended",
        size_bytes(1024 * 1024),
    )
    max_unread_request_bytes: int = option(
        "max-unread-request-bytes",
        64 * 1024 * 1024,
        "the same of one request, which is ended beyond it",
        size_bytes(1024 * 1024),
    )
    max_unread_s: float = option(
        "max-unread-seconds", 60.0, "a request is ended whose answer is not read for so long", seconds(1.0)
    )
    max_retries: int = option(
        "max-retries",
        2,
        "how often in a row a request is moved to another pair of workers without progress; unless it is 0, workers "
        "that were not tried yet are tried beyond that, as long as none is lost",
        integer(0, 100),
    )
    patience_s: float = option(
        "patience-seconds",
        10.0,
        "how long a request waits, as far as its deadline allows, for workers that are missing or were lost",
        seconds(0, 3600),
    )
    fallback: str = option(
        "fallback",
        "fail",
        "what becomes of a prompt while no prefill worker is ready: fail = it waits for one, and fails after "
        "--patience-seconds; local = decode workers compute it beside their streams",
        one_of("fail", "local"),
    )
    max_priority: int = option(
        "max-priority",
        0,
        "highest priority that a request may have, unless the token file says otherwise of its token",
        integer(-(2**31), 2**31 - 1),
    )
    lease_s: float = _lease()
    drain_grace_s: float = _drain_grace()
    max_receive_bytes: int = _max_receive()
    admin_listen: str | None = _admin_listen()
    log_format: str = _log_format()
    log_level: str = _log_level()
    limits: Limits = grouped(Limits)
    security: SecurityConfig = grouped(SecurityConfig)

    @property
    def ports(self) -> Ports:
        """Where it listens, by option."""
        return (("--listen", self.listen), ("--admin-listen", self.admin_listen))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What both kinds of workers take."""

    model: str = _model()
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
    kv_events_format: str = option(
        "kv-events-format",
        "map",
        "form of each KV event: map, as vLLM publishes it now, or array, as older versions do",
        one_of("map", "array"),
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
    max_seqs: int = option("max-seqs", 64, "sequences in a batch", integer(1, 65536))
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
    lease_s: float = _lease()
    drain_grace_s: float = _drain_grace()
    max_receive_bytes: int = _max_receive()
    admin_listen: str | None = _admin_listen()
    log_format: str = _log_format()
    log_level: str = _log_level()
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
        "seconds between two tokens of a stream that chunks of prompts must leave; 0 = any number, auto = a multiple "
        "of what a step without prompts takes",
        seconds(0, 60),
        none_word="auto",
    )
    waiting_served_ratio: float = option(
        "waiting-served-ratio",
        1.0,
        "how many times as long a step may be while more prompts wait than sequences decode",
        number(1, 1000),
    )
    overlap_steps: str = option(
        "overlap-steps",
        "auto",
        "plan and launch a decode step while another one computes; auto = whenever that changes no batch",
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


def _devices(name: str, who: str) -> Any:
    """Where the workers of one role compute."""
    allowed = "cpu, cuda:I, or a UUID that begins with GPU- or MIG-"
    return option(
        name,
        (),
        f"where {who}, dealt round: {allowed}; by default all GPUs are shared out evenly among the workers",
        text(r"cpu|cuda:\d{1,4}|(GPU|MIG)-[\w/-]{1,100}", allowed),
    )


_SET_BY_SERVE = (
    "listen",
    "router",
    "advertise",
    "worker_id",
    "admin_listen",
    "kv_port",
    "device_workers",
    "host_workers",
    "kv_events",
    "kv_events_replay",
    "elastic",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`tandem serve`: a router and its workers as child processes.

    The three groups share their options; an option that is not given keeps each group's own
    default. `argv_of(replace(config.decode_worker, router=..., worker_id=...))` is a child's argv.
    """

    roles: str | None = option(
        "roles",
        None,
        "auto: workers that compute prompts and decode, as each request and step needs; static: prefill and decode "
        "workers. By default static if --prefill, --decode or their devices are given, else auto",
        one_of("auto", "static"),
        none_word="unset",
    )
    num_workers: int | None = option(
        "workers", None, "elastic workers; auto = one per GPU, or two without GPUs", integer(1, 64), none_word="auto"
    )
    num_prefill: int | None = option(
        "prefill", None, "prefill workers; auto = 1, with --roles static", integer(0, 64), none_word="auto"
    )
    num_decode: int | None = option(
        "decode", None, "decode workers; auto = 1, with --roles static", integer(1, 64), none_word="auto"
    )
    prefill_devices: tuple[str, ...] = _devices("prefill-devices", "prefill workers compute")
    decode_devices: tuple[str, ...] = _devices("decode-devices", "decode workers compute")
    http: str | None = option(
        "http",
        None,
        "address at which the gateway smg serves OpenAI's and Anthropic's APIs over HTTP",
        host_port(port_zero=True),
        none_word="none",
    )
    router: RouterConfig = grouped(RouterConfig)
    prefill_worker: PrefillConfig = grouped(PrefillConfig, own=_SET_BY_SERVE)
    decode_worker: DecodeConfig = grouped(DecodeConfig, own=_SET_BY_SERVE)

    @property
    def of_static(self) -> dict[str, object]:
        """What only workers of static roles have, by option, as far as it was given."""
        given = {
            "--prefill": self.num_prefill,
            "--decode": self.num_decode,
            "--prefill-devices": self.prefill_devices or None,
            "--decode-devices": self.decode_devices or None,
        }
        return {flag: value for flag, value in given.items() if value is not None}

    @property
    def is_static(self) -> bool:
        """Whether its workers have static roles."""
        return self.roles == "static" or (self.roles is None and bool(self.of_static))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What the commands that call a server take."""

    target: str = option("target", DEFAULT_ADDRESS, "address of a router", host_port())
    timeout_s: float = option("timeout-seconds", 300.0, "deadline of one call", seconds(0.001))
    security: ClientSecurityConfig = grouped(ClientSecurityConfig)


_ALL: tuple[type[Any], ...] = (RouterConfig, PrefillConfig, DecodeConfig, ElasticConfig, ServeConfig, ClientConfig)


def load(cls: type[T], namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Reads one process's config. `environ` None = this process's own.

    Raises ConfigError that names the flag or the variable: bad value, unknown `TANDEM_` key.
    """
    variables = os.environ if environ is None else environ
    check_known(variables, _ALL)
    return load_options(cls, namespace, variables)


def environment() -> Mapping[str, str]:
    """This process's variables, for what is not Tandem's own to name."""
    return os.environ


def show_gpus(names: str) -> None:
    """From now on CUDA, and programs that this process becomes or starts, see these only, in this order."""
    os.environ[_VISIBLE_GPUS] = names


def keep_ucx_off_other_processes() -> None:
    """UCX then moves bytes by networks alone, never by writing another process's memory on this host.

    Of such writes only that other process could prove the end. To be called before UCX is initialized.
    """
    os.environ["UCX_TLS"] = "^cma,knem,xpmem,posix,sysv,cuda_ipc,rocm_ipc"


def quiet_grpc() -> None:
    """Keeps gRPC's own informational lines off stderr, unless `GRPC_VERBOSITY` asks for them.

    To be called before gRPC is imported for the first time in a process.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
