"""Decode steps as CUDA graphs: one launch instead of hundreds, at batch sizes padded to those captured.

    capture   at start, for each shape (num_seqs, max_seq_len), largest first, into one memory pool
    run       puts a step's inputs into the static ones, fills the rest with empty rows, replays

An empty row has seq_len 0 and slot -1: it reads no block and writes none. Lengths on the host
are those of the shape, a bound; kernels take each seq's own from the device, so only kernels
that do can be captured (`CAPTURABLE`). A few bounds are enough: they size grids and workspaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import Batch, Forward
from engine.device import synchronize
from kernels.attention import AttentionMetadata
from kernels.compiled_step import StepInputs
from kernels.step_inputs import GraphRows, load_rows
from shell.progress import track
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)

CAPTURABLE = frozenset({"flash_attn", "triton"})
"""Kernels that never look at the device from the host."""
MAX_CAPTURED_SEQS = 256
"""Larger batches compute long enough to hide their launches."""
_SPACING = ((2, 1), (4, 2), (8, 4), (64, 8), (128, 16), (256, 32))
"""`(up to, step)`: from 16 on, less than a third of the rows is padding. 64 beyond the last."""
_CONTEXT_BOUNDS = (2048, 8192)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What is fixed in a graph."""

    num_seqs: int
    """Rows, padding included."""
    max_seq_len: int
    """No seq is longer."""


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending, up to `largest` itself; none for 0."""
    sizes = {largest} if largest else set()
    size = 1
    while size < largest:
        sizes.add(size)
        size += next((step for limit, step in _SPACING if size < limit), 64)
    return tuple(sorted(sizes))


def context_bounds(max_seq_len: int) -> tuple[int, ...]:
    """Bounds on the longest seq to capture for, ascending, up to `max_seq_len` itself."""
    return (*(bound for bound in _CONTEXT_BOUNDS if bound < max_seq_len), max_seq_len)


class CudaCapturer:
    """Records work on a GPU; all its graphs share one memory pool.

    To be used on the engine thread, before anything else runs on the device.
    What a capture allocates and lets go is free for the next one: replays never overlap, so the
    pool is as large as the largest graph, if that is captured first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._reserved_before = self._reserved_now()

    @property
    def num_bytes(self) -> int:
        """Device memory that the captures so far have taken of torch's allocator; the driver's share is not known."""
        return self._reserved_now() - self._reserved_before

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Calls `work` twice, and records what it launches. Raises RuntimeError (torch) if that fails."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(current):  # set again at the end, whatever fails within
            # Compiles kernels and opens libraries, which a capture may not; those keep workspaces by stream.
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    work()
                graph = torch.cuda.CUDAGraph()
                # thread_local: what other threads ask of the device meanwhile is not recorded and does not disturb.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                synchronize(self._device)  # the first call may still run, on memory that is given back now
                raise
        current.wait_stream(self._stream)
        return graph

    def _reserved_now(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what is only kept for later is not taken
        return torch.cuda.memory_reserved(self._device)


class DecodeGraphs:
    """Runs decode steps of `decoder` over `kv_cache` `[N, L, 2, Hkv, S, D]`, both lent."""

    def __init__(
        self,
        decoder: Forward,
        kv_cache: torch.Tensor,
        vocab_size: int,
        sizes: tuple[int, ...],
        bounds: tuple[int, ...],
    ) -> None:
        """`sizes` and `bounds`, ascending, make the shapes; nothing is captured yet."""
        self._decoder = decoder
        self._kv = kv_cache
        self._block_size = kv_cache.shape[4]
        self._sizes = sizes
        self._bounds = bounds
        size, device = sizes[-1], kv_cache.device
        self._rows = GraphRows.empty(size, -(-bounds[-1] // self._block_size), device)
        self._sample_rows = torch.arange(size, device=device)  # [B], never changes
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=device)  # [B + 1], never changes
        self._logits = torch.zeros(size, vocab_size, dtype=torch.float32, device=device)  # [B, V]
        self._graphs: dict[GraphShape, torch.cuda.CUDAGraph] = {}

    def capture(self, capturer: CudaCapturer) -> None:
        """Records every shape. Those that do not fit into memory are left to ordinary steps, like all if one breaks."""
        started_s, num_refused = time.monotonic(), 0
        rows = self._rows
        self._load(rows.token_ids[:0], rows.seq_lens[:0], rows.block_tables[:0], self._sizes[-1])  # compiles it
        shapes = [GraphShape(size, bound) for size in reversed(self._sizes) for bound in reversed(self._bounds)]
        for shape in track(shapes, "capturing decode graphs"):
            try:
                self._graphs[shape] = self._record(capturer, shape)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(
                    error
                ):  # torch's, or the driver's
                    num_refused += 1
                    continue
                self._graphs.clear()  # a kernel that cannot be recorded: slower, not wrong
                _log.warning("decode steps run without graphs", shape=shape, error=str(error))
                return
        _log.info(
            "decode graphs captured",
            graphs=len(self._graphs),
            refused_for_memory=num_refused,
            largest_batch=max((shape.num_seqs for shape in self._graphs), default=0),
            context_bounds=self._bounds,
            bytes=capturer.num_bytes,
            seconds=round(time.monotonic() - started_s, 2),
        )

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Computes a decode step in which every seq draws; None if no graph serves it, and nothing has been done then.

        Returns logits `[B, V]` float32, one row per seq, valid until the next call.
        """
        num_seqs = len(batch.metadata.query_lens_host)
        if batch.metadata.max_query_len != 1 or len(batch.sample_rows) != num_seqs:
            return None
        shape = GraphShape(
            next((size for size in self._sizes if size >= num_seqs), 0),
            next((bound for bound in self._bounds if bound >= batch.metadata.max_seq_len), 0),
        )
        graph = self._graphs.get(shape)
        if graph is None:
            return None
        self._load(batch.token_ids, batch.metadata.seq_lens, batch.metadata.block_tables, shape.num_seqs)
        graph.replay()
        return self._logits[:num_seqs]

    def _load(self, token_ids: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor, num_rows: int) -> None:
        load_rows(self._rows, token_ids, seq_lens, block_tables, num_rows, self._block_size)

    def _record(self, capturer: CudaCapturer, shape: GraphShape) -> torch.cuda.CUDAGraph:
        inputs, rows = self._rows, shape.num_seqs
        metadata = AttentionMetadata(
            cu_seqlens_q=self._cu_seqlens_q[: rows + 1],
            seq_lens=inputs.seq_lens[:rows],
            block_tables=inputs.block_tables[:rows, : -(-shape.max_seq_len // self._block_size)],
            slot_mapping=inputs.slot_mapping[:rows],
            query_lens_host=(1,) * rows,
            seq_lens_host=(shape.max_seq_len,) * rows,
        )

        def step() -> None:
            tokens = inputs.token_ids[:rows], inputs.positions[:rows]
            logits = self._decoder.forward(StepInputs(*tokens, self._kv, metadata, self._sample_rows[:rows]))
            self._logits[:rows].copy_(logits)  # so that the graph's own logits are free for the next capture

        return capturer.capture(step)
