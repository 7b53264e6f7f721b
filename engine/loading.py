"""From options to an engine ready to step: model, KV cache, block pool, engine thread.

Both workers start here. Loading runs on the engine thread itself, which keeps the whole process at one pool of threads.
Cores and priority are the process's own: `cli.launch` sets them before anything starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.allocator import keep_freed_memory
from engine.block_pool import BlockPool
from engine.chunking import ChunkTokens, EngineSizes
from engine.disk_tier import DiskTier
from engine.engine_thread import EngineThread
from engine.graph_shapes import FLASH_RUNG, MAX_CAPTURED_SEQS, PROMPTS_BESIDE, GraphLadder
from engine.graphs import CAPTURABLE, CudaCapturer, StepGraphs
from engine.host_tier import HostTier
from engine.kv_cache import KvCache
from engine.memory import (
    available_memory_bytes,
    blocks_that_fit,
    check_memory,
    pool_decision,
    ring_rows_for,
    seqs_decision,
    seqs_of,
)
from engine.prefix_cache import PrefixCache
from engine.ranks import Ranks, check_ranks, ranks_decision, shares_of
from engine.runner import Runner
from engine.warm_up import StepSizes, warm_up
from kernels.cpu import library
from kernels.dispatch import select_kernels, watch_compilations
from kernels.group import Group, SoloGroup
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from models.config import read_config, read_dtype
from models.decoder import Decoder
from models.dtypes import torch_dtype
from models.files.checkpoint import resolve_model
from models.loading import LoadedModel, load_model
from shell.config import WorkerConfig
from shell.cores import CoreShare
from shell.telemetry.logging import get_logger
from tandem.decision import Decision
from tandem.errors import ConfigError
from tandem.kv_layout import SCALE_BYTES, DType, KvLayout, QuantDType

_log = get_logger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRole:
    """What a worker's role asks of its engine, beside the options of the process."""

    prefills_only: bool = False
    """Whether no step has decodes."""
    shared_kv: bool = False
    """Puts the pool, or its ring, into shared memory, for the shm transport."""
    device_shared_kv: bool = False
    """Allocates a pool on a GPU so that peers may map it, for the cuda_ipc transport."""
    staged_kv: bool = False
    """Gives the pool a ring on a CPU too: for tests."""


ANY_ROLE = EngineRole()


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine. The worker's loop owns `cache` and its pool and drives `thread`; `close` ends all."""

    model: LoadedModel
    layout: KvLayout
    kv_cache: KvCache
    cache: PrefixCache
    tier: HostTier | None
    """Where `cache` puts evicted blocks."""
    disk: DiskTier | None
    """Where `cache` puts what `tier` has no room for."""
    thread: EngineThread
    backend_name: str
    sizes: EngineSizes
    decisions: tuple[Decision, ...] = ()
    """What loading chose by itself."""
    graphs: StepGraphs | None = None
    """Captured steps; None = this engine captures no steps."""
    ranks: Ranks | None = None
    """The other processes that compute the model; None if there are none."""

    @property
    def pool(self) -> BlockPool:
        """All of its blocks are taken through `cache`."""
        return self.cache.pool

    def close(self) -> None:
        """Joins the thread, then gives the KV memory back. Idempotent."""
        self.thread.close()
        if self.disk is not None:
            self.disk.close()
        if self.tier is not None:
            self.tier.close()
        self.kv_cache.close()
        if self.ranks is not None:
            self.ranks.close()


def open_engine_executor(threads: int | None = None) -> ThreadPoolExecutor:
    """Starts the thread that models are loaded and stepped on; the caller shuts it down.

    `threads`: how many of torch's compute with that thread; None leaves torch's setting.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-engine")
    if threads is not None:
        executor.submit(torch.set_num_threads, threads).result()
    return executor


def load_engine(config: WorkerConfig, role: EngineRole = ANY_ROLE) -> Engine:
    """Blocks until the engine can step. Raises ConfigError and CheckpointError."""
    started_s = time.monotonic()
    device = resolve_device(config.device)
    check_ranks(config, device)
    max_seqs, shares = seqs_of(config.max_seqs, device), shares_of(config)
    executor = open_engine_executor(config.threads if len(shares) == 1 else shares[0].threads)
    owned: list[KvCache | HostTier | Ranks] = []
    try:
        ranks = executor.submit(_start_ranks, config, shares).result()
        if ranks is not None:
            owned.append(ranks)
        if device.type == "cuda":
            executor.submit(torch.cuda.set_device, device).result()  # the thread's own: kernels launch on it
        kernels = select_kernels(config.attention_backend, device, probe_dtype(config), config.cpu_tier)
        model = executor.submit(load_here, config, device, kernels, None if ranks is None else ranks.group).result()
        layout = layout_of(config, model)
        chunk_tokens = ChunkTokens.of(config.chunk_tokens, device, kernels.full_tokens)
        most_tokens = chunk_tokens.alone if role.prefills_only else chunk_tokens.beside
        largest = StepSizes(most_tokens, max_seqs, model.config.context_tokens)
        ladder = ladder_of(config, role, model, kernels.name, largest)
        warming = partial(warm_up, model, kernels, layout, largest, ladder)
        step_bytes = executor.submit(warming).result() if device.type == "cuda" else 0
        kv_cache = _create_pool(config, role, model, layout, max_seqs, step_bytes)
        owned.append(kv_cache)
        if ranks is not None:
            ranks.create_pools(kv_cache, model.fingerprint)
        if kv_cache.staging is not None:
            executor.submit(library.obstacle).result()  # hashes the ring's rows; compiled here, never on a loop
        graphs = None if ladder is None else executor.submit(_captured, ladder, model, kv_cache).result()
        tier = _host_tier(config, kv_cache, device)
        if tier is not None:
            owned.append(tier)
            executor.submit(tier.measure, kv_cache.blocks_view).result()
        runner = Runner(model.decoder, kv_cache, kernels, graphs, tier, ranks=ranks)
        disk = _disk_tier(config, tier, layout.block_bytes)
    except BaseException:
        executor.shutdown()
        for each in reversed(owned):
            each.close()
        raise
    watch_compilations(device)
    pool, rungs = BlockPool(kv_cache.num_blocks, config.block_size), () if graphs is None else graphs.rungs
    longest = min(model.config.context_tokens, kv_cache.num_blocks * layout.block_size)
    engine = Engine(
        model=model,
        layout=layout,
        kv_cache=kv_cache,
        cache=PrefixCache(pool, enabled=config.prefix_cache, tier=tier, disk=disk),
        tier=tier,
        disk=disk,
        thread=EngineThread(runner, executor),
        backend_name=kernels.name,
        sizes=EngineSizes(chunk_tokens, max_seqs, longest, rungs),
        decisions=_decisions(config, model, layout, kernels, kv_cache, max_seqs, chunk_tokens, graphs, shares),
        graphs=graphs,
        ranks=ranks,
    )
    _log_loaded(engine, kernels, config.attention_backend, time.monotonic() - started_s)
    return engine


def _start_ranks(config: WorkerConfig, shares: Sequence[CoreShare]) -> Ranks | None:
    """On the engine thread, which takes its own share with all threads that it starts; None without other ranks."""
    if len(shares) == 1:
        return None
    os.sched_setaffinity(0, shares[0].cores)
    return Ranks.start(config, shares)


def _decisions(
    config: WorkerConfig,
    model: LoadedModel,
    layout: KvLayout,
    kernels: Kernels,
    kv_cache: KvCache,
    max_seqs: int,
    chunk_tokens: ChunkTokens,
    graphs: StepGraphs | None,
    shares: Sequence[CoreShare],
) -> tuple[Decision, ...]:
    """Returns what was chosen above, and why."""
    num_blocks = kv_cache.num_blocks
    ranks = ranks_decision(shares, kv_cache.layout, num_blocks)
    pool = pool_decision(config, layout, model.device, num_blocks, max_seqs * model.config.context_tokens)
    chunks = chunk_tokens.decision(config.chunk_tokens, model.device)
    captured = None if graphs is None else graphs.decision(config.cuda_graph_seqs)
    return tuple(
        filter(None, (ranks, kernels.decision, pool, seqs_decision(config.max_seqs, max_seqs), chunks, captured))
    )


def _log_loaded(engine: Engine, kernels: Kernels, attention_asked: str, seconds: float) -> None:
    kv_cache = engine.kv_cache
    _log.info(
        "engine loaded",
        device=engine.model.device,
        dtype=engine.model.dtype,
        kv_dtype=engine.layout.dtype,
        attention=kernels.name,
        operations=kernels.operations.name,
        attention_asked=attention_asked,
        kv_blocks=kv_cache.num_blocks,
        kv_bytes=kv_cache.num_blocks * engine.layout.block_bytes,
        host_ring_rows=0 if kv_cache.staging is None else len(kv_cache.host_rows),
        seconds=round(seconds, 2),
    )


def load(config: WorkerConfig, device: torch.device, kernels: Kernels, group: Group | None = None) -> LoadedModel:
    """Returns the model with its weights on `device`, rounded as the options say; the part of this rank of `group`."""
    if group is None and config.tensor_parallel is not None:
        group = SoloGroup()
    form = None if config.quantize is None else QuantForm(config.quantize)
    path = resolve_model(config.model)
    how = config.model_impl, config.context_tokens, config.activations
    return load_model(path, config.dtype, device, kernels, form, *how, group)


def load_here(config: WorkerConfig, device: torch.device, kernels: Kernels, group: Group | None) -> LoadedModel:
    """Loads on the thread that is to compute, and gives that thread and its process what steps need."""
    model = load(config, device, kernels, group)
    keep_freed_memory()
    if kernels.take_thread is not None:
        kernels.take_thread()
    return model


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


def probe_dtype(config: WorkerConfig) -> torch.dtype:
    """Returns the dtype that attention will run in, as far as the config says before weights are read."""
    if config.dtype in set(DType):
        return torch_dtype(DType(config.dtype))
    return torch_dtype(read_dtype(read_config(resolve_model(config.model))) or DType.FLOAT32)


def ladder_of(
    config: WorkerConfig, role: EngineRole, model: LoadedModel, kernels_name: str, largest: StepSizes
) -> GraphLadder | None:
    """Returns the shapes to capture: those that steps can have; None where there is nothing to capture.

    Of transformers' code nobody knows if it may be captured.
    """
    asked = MAX_CAPTURED_SEQS if config.cuda_graph_seqs is None else config.cuda_graph_seqs
    if model.device.type != "cuda" or kernels_name not in CAPTURABLE or not asked:
        return None
    if not isinstance(model.decoder, Decoder) or model.decoder.waits_for_device:
        return None
    decode_seqs = 0 if role.prefills_only else min(asked, largest.max_seqs)
    rung_tokens = largest.chunk_tokens
    if role.prefills_only and kernels_name == "flash_attn":
        rung_tokens = min(rung_tokens, FLASH_RUNG)
    rung_seqs = largest.max_seqs + (0 if role.prefills_only else PROMPTS_BESIDE)
    return GraphLadder.of(decode_seqs, rung_tokens, rung_seqs, largest.context_tokens)


def _captured(ladder: GraphLadder, model: LoadedModel, kv_cache: KvCache) -> StepGraphs:
    """On the engine thread."""
    pool_tokens = kv_cache.num_blocks * kv_cache.layout.block_size
    graphs = StepGraphs(model.decoder, kv_cache.tensor, model.config.vocab_size, ladder.within(pool_tokens))
    graphs.capture(CudaCapturer(model.device))
    return graphs


def layout_of(config: WorkerConfig, model: LoadedModel) -> KvLayout:
    """Returns how KV lies in the pool. Raises ConfigError if scales would not lie at whole words."""
    layout = model.kv_layout(config.block_size, None if config.kv_dtype == AUTO else QuantDType(config.kv_dtype))
    if layout.block_size * layout.row_bytes % SCALE_BYTES:
        heads = f"heads of {layout.head_dim} elements in blocks of {layout.block_size} tokens"
        raise ConfigError("--kv-dtype", f"{config.kv_dtype} does not take {heads}: an even --block-size does")
    return layout


def _create_pool(
    config: WorkerConfig, role: EngineRole, model: LoadedModel, layout: KvLayout, max_seqs: int, step_bytes: int
) -> KvCache:
    """Returns the pool, with its ring if it has one, beside `step_bytes` of the device for steps.

    Of several ranks, this one's part. Raises ConfigError if there is not so much memory for all.
    """
    own = model.rank_layout(layout.block_size, layout.dtype if isinstance(layout.dtype, QuantDType) else None)
    layout = replace(own, num_kv_heads=own.num_kv_heads * config.num_ranks)
    num_blocks = blocks_that_fit(
        config, layout, model.device, max_seqs * model.config.context_tokens, step_bytes=step_bytes
    )
    ring_rows = 0
    if role.staged_kv or model.device.type != "cpu":
        ring_rows = ring_rows_for(config, layout, num_blocks)
    check_memory(layout, num_blocks, model.device, ring_rows, step_bytes)
    return KvCache.create(
        own,
        num_blocks,
        model.device,
        shared=role.shared_kv,
        ring_rows=ring_rows,
        device_shared=role.device_shared_kv,
    )


def _host_tier(config: WorkerConfig, kv_cache: KvCache, device: torch.device) -> HostTier | None:
    """Raises ConfigError if nothing would be put there, or if there is not so much memory."""
    num_rows = config.host_cache_bytes // kv_cache.layout.block_bytes
    if not num_rows:
        return None
    if not config.prefix_cache:
        raise ConfigError(
            "--host-cache-memory", "keeps what the prefix cache knows, and --no-prefix-cache turns that off"
        )
    available = available_memory_bytes(torch.device("cpu"))
    if config.host_cache_bytes > available:
        raise ConfigError("--host-cache-memory", f"{config.host_cache_bytes} bytes; {available} are available")
    return HostTier(num_rows, kv_cache.layout.block_bytes, pinned_for=device if device.type == "cuda" else None)


def _disk_tier(config: WorkerConfig, tier: HostTier | None, block_bytes: int) -> DiskTier | None:
    """Raises ConfigError without a host tier before it, or if there is no such folder, or not so much space."""
    if config.disk_cache is None:
        return None
    if tier is None:
        raise ConfigError("--disk-cache", "needs --host-cache-memory of a block at least: KV goes to disk from there")
    folder, num_slots = Path(config.disk_cache.path), config.disk_cache.size_bytes // block_bytes
    if not num_slots:
        raise ConfigError("--disk-cache", f"{config.disk_cache.size_bytes} bytes; a block has {block_bytes}")
    try:
        return DiskTier(folder, num_slots, block_bytes)
    except OSError as error:
        wanted = f"{num_slots * block_bytes} bytes in {folder}"
        raise ConfigError("--disk-cache", f"cannot have {wanted}: {error.strerror}") from error
