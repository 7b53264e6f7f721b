"""Decode steps over static, padded inputs: which shape serves whom, and that padding changes nothing.

On a CPU a fake stands in for the capture: replaying means calling the recorded work again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from engine.batch import Batch, Forward, build_batch
from engine.draws import SampleSpec
from engine.graphs import CudaCapturer, DecodeGraphs, batch_sizes, context_bounds
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.step import ScheduledSeq, Step
from kernels.attention import AttentionMetadata, AttentionParams
from kernels.compiled_step import StepInputs
from kernels.dispatch import select_kernels
from kernels.operations import Kernels
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.loading import LoadedModel, load_model
from tandem.types import BlockId, SamplingParams, TokenId
from tests.kernels.devices import needs_gpu

BLOCK_SIZE, NUM_BLOCKS = 4, 64
SIZES, BOUNDS = (1, 2, 4, 6), (16, 40)
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0)


class DeviceLengths:
    """Attention that, like kernels under capture, believes no length on the host; empty rows read nothing."""

    name = "device lengths"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        starts = metadata.cu_seqlens_q.tolist()
        for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            assert seq_len <= metadata.seq_lens_host[seq]
            assert seq_len <= BLOCK_SIZE * metadata.block_tables.shape[1]
            if seq_len:
                query_len = rows.stop - rows.start
                alone = AttentionMetadata(
                    cu_seqlens_q=torch.tensor([0, query_len], dtype=torch.int32),
                    seq_lens=metadata.seq_lens[seq : seq + 1],
                    block_tables=metadata.block_tables[seq : seq + 1],
                    slot_mapping=metadata.slot_mapping[rows],
                    query_lens_host=(query_len,),
                    seq_lens_host=(seq_len,),
                )
                out[rows] = ReferenceBackend().attend(q[rows], k[rows], v[rows], kv_layer, alone, params)
        return out


class CallAgain:
    """A capturer for a CPU; refuses batches larger than `fits`, or breaks at once."""

    num_bytes = 0

    def __init__(self, fits: int = 1000, *, broken: bool = False, says: type[RuntimeError] = RuntimeError) -> None:
        self.num_captured = self.num_replayed = self._num_asked = 0
        self._fits = fits
        self._broken = broken
        self._says = says

    def capture(self, work: Callable[[], None]) -> Replay:
        self._num_asked += 1
        if self._broken and self._num_asked > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        size = SIZES[::-1][(self._num_asked - 1) // len(BOUNDS)]  # largest first
        if size > self._fits:
            raise self._says("CUDA error: out of memory")
        self.num_captured += 1
        work()
        return Replay(self, work)


class Replay:
    def __init__(self, capturer: CallAgain, work: Callable[[], None]) -> None:
        self._capturer = capturer
        self._work = work

    def replay(self) -> None:
        self._capturer.num_replayed += 1
        self._work()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = save_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("llama"))
    kernels = Kernels(DeviceLengths(), ReferenceOperations())
    return load_model(path, "float32", torch.device("cpu"), kernels)


def make_cache(model: LoadedModel) -> KvCache:
    """Content that depends on the slot, so that reading a wrong one shows."""
    cache = KvCache.create(model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, torch.device("cpu"))
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return cache


@pytest.fixture
def caches(model: LoadedModel) -> Iterator[tuple[KvCache, KvCache]]:
    pair = (make_cache(model), make_cache(model))
    yield pair
    for cache in pair:
        cache.close()


def seqs_of(*seq_lens: int, query_len: int = 1, seed: int = 0) -> list[ScheduledSeq]:
    rng = random.Random(seed)
    ids = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [
        ScheduledSeq(
            token_ids=tuple(TokenId(rng.randrange(VOCAB_SIZE)) for _ in range(query_len)),
            context_len=seq_len - query_len,
            block_table=[BlockId(ids.pop()) for _ in range(-(-seq_len // BLOCK_SIZE))],
            samples=(GREEDY,),
        )
        for seq_len in seq_lens
    ]


def batch_of(seqs: list[ScheduledSeq]) -> Batch:
    return build_batch(seqs, BLOCK_SIZE, torch.device("cpu"))


def forward(decoder: Forward, cache: KvCache, batch: Batch) -> torch.Tensor:
    return decoder.forward(
        StepInputs(batch.token_ids, batch.positions, cache.tensor, batch.metadata, batch.sample_rows)
    )


def captured(model: LoadedModel, cache: KvCache, capturer: CallAgain) -> DecodeGraphs:
    graphs = DecodeGraphs(model.decoder, cache.tensor, VOCAB_SIZE, SIZES, BOUNDS)
    graphs.capture(capturer)
    return graphs


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (0, ()),
        (1, (1,)),
        (5, (1, 2, 4, 5)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (200, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200)),
    ],
)
def test_sizes_stand_closer_where_batches_are_small(largest: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(largest) == sizes


@pytest.mark.parametrize("num_seqs", range(16, 257))
def test_less_than_a_third_is_padding(num_seqs: int) -> None:
    padded = min(size for size in batch_sizes(256) if size >= num_seqs)
    assert padded - num_seqs < padded / 3


def test_contexts_have_few_bounds() -> None:
    assert context_bounds(1000) == (1000,)
    assert context_bounds(8192) == (2048, 8192)
    assert context_bounds(131072) == (2048, 8192, 131072)


def test_capturing_touches_no_block(model: LoadedModel, caches: tuple[KvCache, KvCache]) -> None:
    capturer = CallAgain()
    captured(model, caches[0], capturer)
    assert capturer.num_captured == len(SIZES) * len(BOUNDS)
    assert torch.equal(caches[0].tensor, caches[1].tensor)


@pytest.mark.parametrize("seq_lens", [(1,), (9, 16), (3, 17, 5), (40, 1, 2, 33, 8), (7, 7, 7, 7, 7, 7)])
def test_a_padded_step_gives_the_logits_and_the_kv_of_a_plain_one(
    model: LoadedModel, caches: tuple[KvCache, KvCache], seq_lens: tuple[int, ...]
) -> None:
    plain, padded = caches
    capturer = CallAgain()
    graphs = captured(model, padded, capturer)
    for seed in range(3):
        batch = batch_of(seqs_of(*seq_lens, seed=seed))
        expected = forward(model.decoder, plain, batch)
        logits = graphs.run(batch)
        assert logits is not None
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(padded.tensor, plain.tensor)
    assert capturer.num_replayed == 3


def test_rows_of_an_earlier_step_write_nothing_in_a_smaller_one(
    model: LoadedModel, caches: tuple[KvCache, KvCache]
) -> None:
    _, cache = caches
    graphs = captured(model, cache, CallAgain())
    assert graphs.run(batch_of(seqs_of(9, 9, 9, 9, 9, 9))) is not None
    cache.fill_poison()
    (seq, *_) = seqs_of(1, 9, 9, seed=5)
    others = seqs_of(1, 1, 1, seed=6)
    assert graphs.run(batch_of([seq, *others[1:]])) is not None  # 3 rows of 4
    written = {int(table[0]) for table in (each.block_table for each in [seq, *others[1:]])}
    untouched = [block for block in range(NUM_BLOCKS) if block not in written]
    assert bool(cache.tensor[untouched].isnan().all())


@pytest.mark.parametrize(
    "seqs",
    [seqs_of(8, query_len=3), [*seqs_of(8), *seqs_of(5, query_len=2)], seqs_of(*(3,) * 7), seqs_of(41)],
    ids=["prompt", "mixed", "too many", "too long"],
)
def test_what_no_graph_serves_is_left_alone(
    model: LoadedModel, caches: tuple[KvCache, KvCache], seqs: list[ScheduledSeq]
) -> None:
    graphs = captured(model, caches[0], CallAgain())
    assert graphs.run(batch_of(seqs)) is None
    assert graphs.run(batch_of([seq._replace(samples=()) for seq in seqs_of(8)])) is None
    assert torch.equal(caches[0].tensor, caches[1].tensor)


@pytest.mark.parametrize("says", [torch.OutOfMemoryError, RuntimeError], ids=["torch", "driver"])
def test_what_does_not_fit_into_memory_is_computed_without_a_graph(
    model: LoadedModel, caches: tuple[KvCache, KvCache], says: type[RuntimeError]
) -> None:
    capturer = CallAgain(fits=2, says=says)
    graphs = captured(model, caches[0], capturer)
    assert capturer.num_captured == 2 * len(BOUNDS)
    assert graphs.run(batch_of(seqs_of(3, 3, 3))) is None
    assert graphs.run(batch_of(seqs_of(3, 3))) is not None


def test_kernels_that_cannot_be_captured_are_no_reason_to_stop(
    model: LoadedModel, caches: tuple[KvCache, KvCache]
) -> None:
    graphs = captured(model, caches[0], CallAgain(broken=True))
    assert graphs.run(batch_of(seqs_of(3))) is None


def test_the_runner_takes_the_same_tokens_from_either(model: LoadedModel, caches: tuple[KvCache, KvCache]) -> None:
    plain, padded = caches
    capturer = CallAgain()
    graphed = Runner(model.decoder, padded, graphs=captured(model, padded, capturer))
    for seqs in (seqs_of(6, 6, query_len=6), seqs_of(7, 7, 12), seqs_of(20)):
        step = Step(tuple(seqs))
        assert graphed.run(step).outputs == Runner(model.decoder, plain).run(step).outputs
    assert capturer.num_replayed == 2


@needs_gpu
def test_a_gpu_replays_the_logits_of_a_plain_step(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    path = save_tiny_model(TINY_MODELS[0], tmp_path)
    loaded = load_model(path, "bfloat16", device, select_kernels("auto", device, torch.bfloat16))
    cache = KvCache.create(loaded.kv_layout(16), 512, device)
    cache.tensor.normal_()
    capturer = CudaCapturer(device)
    graphs = DecodeGraphs(loaded.decoder, cache.tensor, VOCAB_SIZE, batch_sizes(8), context_bounds(4096))
    rng = random.Random(0)
    with torch.inference_mode():
        graphs.capture(capturer)
        assert capturer.num_bytes < 1 << 30
        for num_seqs in (1, 3, 8, 2):
            ids = rng.sample(range(512), 512)
            seqs = [
                ScheduledSeq(
                    (TokenId(7 + i),), length - 1, [BlockId(ids.pop()) for _ in range(length // 16 + 1)], (GREEDY,)
                )
                for i, length in enumerate(rng.choices(range(1, 900), k=num_seqs))
            ]
            batch = build_batch(seqs, 16, device)
            logits = graphs.run(batch)
            assert logits is not None
            replayed = logits.clone()
            torch.testing.assert_close(replayed, forward(loaded.decoder, cache, batch).float(), atol=0.1, rtol=0.1)
    cache.close()
