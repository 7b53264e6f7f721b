"""Steps as CUDA graphs: one launch instead of hundreds, at sizes padded to those captured (`engine.graph_shapes`).

    capture   at start, each shape of the ladder, largest first, into one memory pool
    shape_of  which graph serves a step; the batch is laid out, and uploaded, at that shape's sizes
    run       copies a step's inputs into the static ones, on the compute stream, and replays

Padding reads no block and writes none. Lengths on the host are bounds; kernels take each seq's own from the device, so
only kernels that do can be captured (`CAPTURABLE`). Steps that no graph serves are launched operation by operation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

from engine.batch import Batch, Forward
from engine.device import synchronize
from engine.graph_shapes import GraphLadder, GraphShape
from engine.upload import pack, packed_bytes, unpack
from kernels.attention import AttentionMetadata
from kernels.compiled_step import StepInputs
from shell.progress import track
from shell.telemetry.logging import get_logger
from tandem.decision import Decision, decision

_log = get_logger(__name__)

CAPTURABLE = frozenset({"flash_attn", "triton"})
"""Kernels that never look at the device from the host."""


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


class StepGraphs:
    """Runs steps of `decoder` over `kv_cache` `[N, L, 2, Hkv, S, D]`, both lent."""

    def __init__(self, decoder: Forward, kv_cache: torch.Tensor, vocab_size: int, ladder: GraphLadder) -> None:
        """Nothing is captured yet."""
        self._decoder = decoder
        self._kv = kv_cache
        self._block_size = kv_cache.shape[4]
        self._ladder = ladder
        self._shapes = ladder.shapes
        most_seqs, device = max(shape.num_seqs for shape in self._shapes), kv_cache.device
        num_bytes = max(packed_bytes(shape.empty_inputs()) for shape in self._shapes)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables = torch.full(
            (most_seqs, self._num_columns(ladder.bounds[-1])), -1, dtype=torch.int32, device=device
        )
        self._logits = torch.zeros(most_seqs, vocab_size, dtype=torch.float32, device=device)  # [B, V]
        self._graphs: dict[GraphShape, torch.cuda.CUDAGraph] = {}
        self._rungs: list[GraphShape] = []  # captured, ascending
        self._why_not = ""
        self._num_steps: Counter[GraphShape] = Counter()

    @property
    def num_captured(self) -> int:
        """Returns how many shapes have a graph."""
        return len(self._graphs)

    @property
    def num_refused(self) -> int:
        """Returns how many shapes have none, since memory was short or a kernel cannot be recorded."""
        return len(self._shapes) - len(self._graphs)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Returns the numbers of tokens, ascending, to which steps that are no decodes are padded."""
        return tuple(shape.num_tokens for shape in self._rungs)

    @property
    def num_steps(self) -> Counter[tuple[int, bool]]:
        """Counts the steps that were served, by tokens with padding, and by whether the steps were decodes."""
        steps: Counter[tuple[int, bool]] = Counter()
        for shape, count in tuple(self._num_steps.items()):  # the engine thread may add a shape meanwhile
            steps[shape.num_tokens, shape.is_decode] += count
        return steps

    def rehearse(self) -> None:
        """Computes the largest shapes without seqs, so that the memory profile sees their workspaces."""
        with torch.inference_mode():
            for is_decode in (False, True):
                for shape in [each for each in self._shapes if each.is_decode == is_decode][:1]:
                    self._work(shape)()

    def capture(self, capturer: CudaCapturer) -> None:
        """Records every shape. Those that do not fit into memory are left to ordinary steps, like all decodes, or all
        rungs, if one of them breaks.
        """
        started_s, broken = time.monotonic(), set[bool]()
        with torch.inference_mode():
            for shape in track(self._shapes, "capturing steps as CUDA graphs"):
                if shape.is_decode in broken:
                    continue
                try:
                    self._graphs[shape] = capturer.capture(self._work(shape))
                except RuntimeError as error:
                    if _is_out_of_memory(error):
                        self._why_not = "the others did not fit into memory beside the KV pool"
                        continue
                    broken.add(shape.is_decode)  # a kernel that cannot be recorded: slower, not wrong
                    self._why_not = f"a kernel cannot be captured: {error}"
                    _log.warning("steps run without CUDA graphs", shape=shape, error=str(error))
        self._graphs = {shape: graph for shape, graph in self._graphs.items() if shape.is_decode not in broken}
        self._rungs = sorted((each for each in self._graphs if not each.is_decode), key=lambda each: each.num_tokens)
        _log.info(
            "CUDA graphs captured",
            graphs=self.num_captured,
            refused=self.num_refused,
            largest_batch=self._largest_batch,
            most_tokens=max(self.rungs, default=0),
            context_bounds=self._ladder.bounds,
            bytes=capturer.num_bytes,
            seconds=round(time.monotonic() - started_s, 2),
        )

    def decision(self, asked: int | None) -> Decision:
        """Returns what was captured, and why not more."""
        batches = f"decodes of up to {self._largest_batch} sequences"
        steps = f"other steps of up to {max(self.rungs, default=0)} tokens"
        value = f"{self.num_captured} of {len(self._shapes)}: {batches}, {steps}" if self._graphs else "none"
        why = self._why_not or "sizes of batches and chunks"
        return decision("CUDA graphs", value, "--cuda-graphs", asked is not None and not self._why_not, why)

    def shape_of(self, num_tokens: int, num_seqs: int, num_rows: int, longest: int) -> GraphShape | None:
        """Returns the shape of the graph that serves a step; None if none does. `num_rows`: rows of logits."""
        if num_rows == num_tokens:  # each seq computes one token
            size = next((size for size in self._ladder.batch_sizes if size >= num_seqs), 0)
            bound = next((bound for bound in self._ladder.bounds if bound >= longest), 0)
            shape = GraphShape(size, size, bound)
            if shape in self._graphs:
                return shape
        for shape in self._rungs:
            if shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs and shape.max_seq_len >= longest:
                return shape
        return None

    def run(self, batch: Batch) -> torch.Tensor:
        """Computes a step that was laid out for a graph. Returns logits `[R, V]` float32, valid until the next call."""
        assert batch.graph is not None
        packed, tables = batch.graph.packed, batch.metadata.block_tables
        self._inputs[: len(packed)].copy_(packed)
        self._tables[: len(tables), : tables.shape[1]].copy_(tables)  # what stands beside it is old, and not read
        self._graphs[batch.graph.shape].replay()
        self._num_steps[batch.graph.shape] += 1
        return self._logits[: len(batch.sample_rows)]

    def _work(self, shape: GraphShape) -> Callable[[], None]:
        """Returns what a graph of `shape` holds; the static inputs are those of no seq then."""
        empty = shape.empty_inputs()
        self._inputs[: packed_bytes(empty)].copy_(pack(empty, pin_memory=False))
        token_ids, positions, slots, rows, starts, lens = unpack(self._inputs, empty)
        metadata = AttentionMetadata(
            cu_seqlens_q=starts,
            seq_lens=lens,
            block_tables=self._tables[: shape.num_seqs, : self._num_columns(shape.max_seq_len)],
            slot_mapping=slots,
            query_lens_host=shape.query_lens_bound,
            seq_lens_host=(shape.max_seq_len,) * shape.num_seqs,
            is_padded=not shape.is_decode,
        )

        def step() -> None:
            logits = self._decoder.forward(StepInputs(token_ids, positions, self._kv, metadata, rows))
            self._logits[: shape.num_seqs].copy_(logits)  # so that the graph's own are free for the next capture

        return step

    @property
    def _largest_batch(self) -> int:
        return max((shape.num_seqs for shape in self._graphs if shape.is_decode), default=0)

    def _num_columns(self, max_seq_len: int) -> int:
        return -(-max_seq_len // self._block_size)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch, or the driver, says so."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
