"""From options to an engine ready to step: model, KV cache, block pool, engine thread.

Both workers start here. Loading runs on the engine thread itself (see `engine.placement`).
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.chunking import ChunkTokens
from engine.disk_tier import DiskTier
from engine.engine_thread import EngineThread
from engine.graphs import CAPTURABLE, CudaCapturer, DecodeGraphs, batch_sizes, context_bounds
from engine.host_tier import HostTier
from engine.kv_cache import KvCache
from engine.memory import Sharing, available_memory_bytes, blocks_that_fit, check_memory, ring_rows_for, seqs_of
from engine.placement import ThreadPlacement, open_engine_executor
from engine.prefix_cache import PrefixCache
from engine.runner import Runner
from engine.warm_up import StepSizes, warm_up
from kernels.dispatch import select_kernels, watch_compilations
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from models.config import read_config, read_dtype
from models.decoder import Decoder
from models.dtypes import torch_dtype
from models.loading import LoadedModel, load_model
from shell.config import WorkerConfig
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.kv_layout import SCALE_BYTES, DType, KvLayout, QuantDType

_log = get_logger(__name__)

AUTO = "auto"
_MALLOC_SETTINGS = (
    (-3, 32 << 20),  # M_MMAP_THRESHOLD, the most that glibc takes; larger chunks are still mapped one by one
    (-1, 1 << 30),  # M_TRIM_THRESHOLD
    (-2, 64 << 20),  # M_TOP_PAD
    (-8, 4),  # M_ARENA_MAX: threads of links come and go, and a new arena for each would keep what it once held
)
"""Parameters of mallopt by their numbers in malloc.h; all but the last are bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a worker's config says of its engine."""

    model_path: Path
    device: str = AUTO
    dtype: str = AUTO
    model_impl: str = AUTO
    """Whose code computes it: `models.loading.load_model`'s implementation."""
    context_tokens: int | None = None
    """Longest sequence that is served; None = as long as the model's context."""
    quantize: str | None = None
    """What the weights of a plain checkpoint are rounded to: a `QuantForm`; None = nothing."""
    kv_dtype: str = AUTO
    block_size: int = 16
    kv_blocks: int | None = None
    """Blocks of the pool; None = by memory."""
    kv_memory_bytes: int | None = None
    """Size of the pool; None = a modest share of what is available."""
    sharing: Sharing = field(default_factory=Sharing)
    """Who else takes such a share."""
    prefix_cache: bool = True
    """Whether KV that nobody holds is kept and found again."""
    host_cache_bytes: int = 0
    """Host memory that such KV may move to; less than a block = none."""
    disk_cache_folder: Path | None = None
    """Where a file is made that such KV may move on to from host memory; None = nowhere."""
    disk_cache_bytes: int = 0
    """Size of that file; it holds whole blocks."""
    max_seqs: int = 64
    """Seqs of a step; the default pool is never larger than so many full contexts."""
    chunk_tokens: int = 0
    """Tokens of prompts in a step; 0 = by the device."""
    prefills_only: bool = False
    """Whether no step has others that decode."""
    attention_backend: str = AUTO
    cpu_tier: str | None = None
    """Instructions that the kernels of a CPU use; None = the best that it has."""
    shared_kv: bool = False
    """Puts the pool, or its ring, into shared memory, for the shm transport."""
    host_ring_bytes: int | None = None
    """Host memory through which blocks of a pool on a GPU pass; None = by the size of the pool."""
    device_shared_kv: bool = False
    """Allocates a pool on a GPU so that peers may map it, for the cuda_ipc transport."""
    staged_kv: bool = False
    """Gives the pool such a ring on a CPU too: for tests."""
    graph_seqs: int = 0
    """Largest decode batch that is captured as a CUDA graph, where device and kernels allow it; 0 = none."""
    placement: ThreadPlacement = field(default_factory=ThreadPlacement)

    @property
    def form(self) -> QuantForm | None:
        """Form that plain weights are quantised to when they are loaded; None = they stay as they are."""
        return None if self.quantize is None else QuantForm(self.quantize)

    @classmethod
    def of_worker(
        cls, config: WorkerConfig, model_path: Path, *, shared_kv: bool, device_shared_kv: bool = False
    ) -> EngineOptions:
        """As a worker's options say."""
        return cls(
            model_path=model_path,
            device=config.device,
            dtype=config.dtype,
            model_impl=config.model_impl,
            context_tokens=config.context_tokens,
            quantize=config.quantize,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            kv_blocks=config.kv_blocks,
            kv_memory_bytes=config.kv_memory_bytes,
            host_ring_bytes=config.host_ring_bytes,
            sharing=Sharing(config.device_workers, config.host_workers),
            prefix_cache=config.prefix_cache,
            host_cache_bytes=config.host_cache_bytes,
            disk_cache_folder=None if config.disk_cache is None else Path(config.disk_cache),
            disk_cache_bytes=config.disk_cache_bytes,
            max_seqs=seqs_of(config.max_seqs, resolve_device(config.device)),
            chunk_tokens=config.chunk_tokens,
            attention_backend=config.attention_backend,
            cpu_tier=config.cpu_tier,
            shared_kv=shared_kv,
            device_shared_kv=device_shared_kv,
            placement=ThreadPlacement(threads=config.threads),
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine. The worker's loop owns `cache` and its pool and drives `thread`; `close` ends all."""

    model: LoadedModel
    layout: KvLayout
    kv_cache: KvCache
    cache: PrefixCache
    tier: HostTier | None
    """Where `cache` puts what it evicts."""
    disk: DiskTier | None
    """Where `cache` puts what `tier` has no room for."""
    thread: EngineThread
    backend_name: str
    chunk_tokens: ChunkTokens
    """Tokens of prompts in a step, at most; a worker where nobody decodes has no use for `beside`."""
    max_seqs: int
    """Sequences of a step."""

    @property
    def pool(self) -> BlockPool:
        """All of its blocks are taken through `cache`."""
        return self.cache.pool

    @property
    def fingerprint(self) -> str:
        """The model's: equal on workers that may exchange KV."""
        return self.model.fingerprint

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence, completion included, that context and pool can hold."""
        return min(self.model.config.context_tokens, self.pool.num_blocks * self.layout.block_size)

    def close(self) -> None:
        """Joins the thread, then gives the KV memory back. Idempotent."""
        self.thread.close()
        if self.disk is not None:
            self.disk.close()
        if self.tier is not None:
            self.tier.close()
        self.kv_cache.close()


def load_engine(options: EngineOptions) -> Engine:
    """Blocks until the engine can step. Raises ConfigError and CheckpointError."""
    started_s = time.monotonic()
    device = resolve_device(options.device)
    executor = open_engine_executor(options.placement)
    owned: list[KvCache | HostTier] = []
    try:
        if device.type == "cuda":
            executor.submit(torch.cuda.set_device, device).result()  # the thread's own: kernels launch on it
        kernels = select_kernels(options.attention_backend, device, _probe_dtype(options), options.cpu_tier)
        loading = (options.model_path, options.dtype, device, kernels, options.form, options.model_impl)
        model = executor.submit(load_model, *loading, options.context_tokens).result()
        keep_freed_memory()
        if kernels.take_thread is not None:
            executor.submit(kernels.take_thread).result()
        layout = layout_of(options, model)
        chunk_tokens = ChunkTokens.of(options.chunk_tokens, device, kernels.full_tokens)
        step_bytes = executor.submit(_warm_up, options, model, kernels, layout, chunk_tokens).result()
        kv_cache = _create_pool(options, model, layout, step_bytes)
        owned.append(kv_cache)
        graphs = executor.submit(_capture_graphs, options, model, kv_cache, kernels.name).result()
        tier = _host_tier(options, kv_cache, device)
        if tier is not None:
            owned.append(tier)
            executor.submit(tier.measure, kv_cache.blocks_view).result()
        runner = Runner(model.decoder, kv_cache, kernels, graphs, tier)
        disk = _disk_tier(options, tier, layout.block_bytes)
    except BaseException:
        executor.shutdown()
        for each in reversed(owned):
            each.close()
        raise
    watch_compilations(device)
    pool = BlockPool(kv_cache.num_blocks, options.block_size)
    engine = Engine(
        model=model,
        layout=layout,
        kv_cache=kv_cache,
        cache=PrefixCache(pool, enabled=options.prefix_cache, tier=tier, disk=disk),
        tier=tier,
        disk=disk,
        thread=EngineThread(runner, executor),
        backend_name=kernels.name,
        chunk_tokens=chunk_tokens,
        max_seqs=options.max_seqs,
    )
    _log.info(
        "engine loaded",
        device=device,
        dtype=model.dtype,
        kv_dtype=layout.dtype,
        attention=kernels.name,
        operations=kernels.operations.name,
        attention_asked=options.attention_backend,
        kv_blocks=kv_cache.num_blocks,
        kv_bytes=kv_cache.num_blocks * layout.block_bytes,
        host_ring_rows=0 if kv_cache.staging is None else len(kv_cache.host_rows),
        seconds=round(time.monotonic() - started_s, 2),
    )
    return engine


def keep_freed_memory() -> bool:
    """Lets the C allocator of this process keep what is freed from now on; False where it has no such setting.

    What is free already, such as what loading a model needed for a while, goes back to the system.

    By default glibc returns large freed chunks to the system at once, and each step faults them in
    again, page by page, zeroed: a quarter of a decode step on the demo model (bench/LOG.md).
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    mallopt, trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if mallopt is None or trim is None:
        return False
    trim(0)
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _MALLOC_SETTINGS]
    return all(accepted)


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none. Raises ConfigError if the named device is not here."""
    num_gpus = torch.cuda.device_count()
    if name == AUTO:
        return torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("--device", f"{name!r} is no device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("--device", f"{name!r} is neither cpu nor cuda")
    if device.type == "cpu":
        return device
    index = device.index or 0  # one name for one device: tensors say cuda:0, never cuda
    if index >= num_gpus:
        raise ConfigError(
            "--device", f"{name} is not here; {num_gpus} GPUs are: say --device cpu, or install torch for CUDA"
        )
    return torch.device("cuda", index)


def _probe_dtype(options: EngineOptions) -> torch.dtype:
    """The dtype that attention will run in, as far as the config tells before weights are read."""
    if options.dtype in set(DType):
        return torch_dtype(DType(options.dtype))
    return torch_dtype(read_dtype(read_config(options.model_path)) or DType.FLOAT32)


def _capture_graphs(
    options: EngineOptions, model: LoadedModel, kv_cache: KvCache, kernels_name: str
) -> DecodeGraphs | None:
    """On the engine thread; None where there is nothing to capture: of transformers' code nobody knows if it may be."""
    if model.device.type != "cuda" or kernels_name not in CAPTURABLE or not options.graph_seqs:
        return None
    if not isinstance(model.decoder, Decoder) or model.decoder.waits_for_device:
        return None
    max_seq_len = min(model.config.context_tokens, kv_cache.num_blocks * kv_cache.layout.block_size)
    shapes = (batch_sizes(options.graph_seqs), context_bounds(max_seq_len))
    graphs = DecodeGraphs(model.decoder, kv_cache.tensor, model.config.vocab_size, *shapes)
    with torch.inference_mode():
        graphs.capture(CudaCapturer(model.device))
    return graphs


def layout_of(options: EngineOptions, model: LoadedModel) -> KvLayout:
    """How KV lies in the pool. Raises ConfigError if scales would not lie at whole words."""
    layout = model.kv_layout(options.block_size, None if options.kv_dtype == AUTO else QuantDType(options.kv_dtype))
    if layout.block_size * layout.row_bytes % SCALE_BYTES:
        heads = f"heads of {layout.head_dim} elements in blocks of {layout.block_size} tokens"
        raise ConfigError("--kv-dtype", f"{options.kv_dtype} does not take {heads}: an even --block-size does")
    return layout


def _warm_up(
    options: EngineOptions, model: LoadedModel, kernels: Kernels, layout: KvLayout, chunk_tokens: ChunkTokens
) -> int:
    """On the engine thread. Returns how many bytes of the device steps take beside the pool; not known on a CPU: 0."""
    if model.device.type != "cuda":
        return 0
    largest = chunk_tokens.alone if options.prefills_only else chunk_tokens.beside
    return warm_up(model, kernels, layout, StepSizes(largest, options.max_seqs, model.config.context_tokens))


def _create_pool(options: EngineOptions, model: LoadedModel, layout: KvLayout, step_bytes: int) -> KvCache:
    num_blocks, ring_rows = _sizes(options, model, layout, step_bytes)
    return KvCache.create(
        layout,
        num_blocks,
        model.device,
        shared=options.shared_kv,
        ring_rows=ring_rows,
        device_shared=options.device_shared_kv,
    )


def _sizes(options: EngineOptions, model: LoadedModel, layout: KvLayout, step_bytes: int) -> tuple[int, int]:
    """Blocks of the pool, and rows of its ring if it has one, beside `step_bytes` of the device for its steps.

    Raises ConfigError if there is not so much memory.
    """
    if options.kv_blocks is not None and options.kv_memory_bytes is not None:
        raise ConfigError("--kv-blocks", "and --kv-memory exclude each other")
    max_tokens = options.max_seqs * model.config.context_tokens
    num_blocks = options.kv_blocks or blocks_that_fit(
        layout, options.kv_memory_bytes, model.device, max_tokens, options.sharing, step_bytes=step_bytes
    )
    ring_rows = 0
    if options.staged_kv or model.device.type != "cpu":
        ring_rows = ring_rows_for(layout, num_blocks, options.host_ring_bytes, options.sharing)
    check_memory(layout, num_blocks, model.device, ring_rows, step_bytes)
    return num_blocks, ring_rows


def _host_tier(options: EngineOptions, kv_cache: KvCache, device: torch.device) -> HostTier | None:
    """Raises ConfigError if nothing would be put there, or if there is not so much memory."""
    num_rows = options.host_cache_bytes // kv_cache.layout.block_bytes
    if not num_rows:
        return None
    if not options.prefix_cache:
        raise ConfigError(
            "--host-cache-memory", "keeps what the prefix cache knows, and --no-prefix-cache turns that off"
        )
    available = available_memory_bytes(torch.device("cpu"))
    if options.host_cache_bytes > available:
        raise ConfigError("--host-cache-memory", f"{options.host_cache_bytes} bytes; {available} are available")
    return HostTier(num_rows, kv_cache.layout.block_bytes, pinned_for=device if device.type == "cuda" else None)


def _disk_tier(options: EngineOptions, tier: HostTier | None, block_bytes: int) -> DiskTier | None:
    """Raises ConfigError without a host tier before it, or if there is no such folder, or not so much space."""
    folder, num_slots = options.disk_cache_folder, options.disk_cache_bytes // block_bytes
    if folder is None:
        if num_slots:
            raise ConfigError("--disk-cache-memory", "needs --disk-cache: the folder for its file")
        return None
    if tier is None:
        raise ConfigError("--disk-cache", "needs --host-cache-memory of a block at least: KV goes to disk from there")
    if not num_slots:
        raise ConfigError("--disk-cache-memory", f"{options.disk_cache_bytes} bytes; a block has {block_bytes}")
    try:
        return DiskTier(folder, num_slots, block_bytes)
    except OSError as error:
        wanted = f"{num_slots * block_bytes} bytes in {folder}"
        raise ConfigError("--disk-cache", f"cannot have {wanted}: {error.strerror}") from error
