"""Steps over static, padded inputs: which shape serves whom, and that padding changes nothing.

On a CPU `tests.replays.CallAgain` stands in for the capture.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from engine.batch import Batch, Forward, build_batch
from engine.draws import SampleSpec
from engine.graph_shapes import GraphLadder, GraphShape, batch_sizes, context_bounds, token_rungs
from engine.graphs import CudaCapturer, StepGraphs
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.step import ScheduledSeq, ScoredTokens, Step
from kernels.attention import AttentionMetadata, AttentionParams
from kernels.compiled_step import StepInputs
from kernels.dispatch import select_kernels
from kernels.operations import Kernels, LinearMap
from kernels.quantized import QuantizedWeight
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.loading import LoadedModel, load_model
from tandem.types import BlockId, SamplingParams, TokenId
from tests.kernels.devices import needs_gpu
from tests.replays import CallAgain, rows_apart

BLOCK_SIZE, NUM_BLOCKS = 4, 64
LADDER = GraphLadder((1, 2, 4, 6), (8, 12, 32), 6, (16, 40))
NUM_SHAPES = 4 * 2 + 3
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0)


class DeviceLengths:
    """Attention that, like kernels under capture, believes no length on the host; empty rows read nothing and are zero.
    Rows of no seq are what was in memory.
    """

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
        out = torch.zeros_like(q) if metadata.is_padded else torch.full_like(q, torch.nan)
        starts = metadata.cu_seqlens_q.tolist()
        for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            assert seq_len <= metadata.seq_lens_host[seq]
            assert seq_len <= BLOCK_SIZE * metadata.block_tables.shape[1]
            query_len = rows.stop - rows.start
            assert query_len >= 0
            out[rows] = 0.0
            if seq_len and query_len:
                alone = AttentionMetadata(
                    cu_seqlens_q=torch.tensor([0, query_len], dtype=torch.int32),
                    seq_lens=metadata.seq_lens[seq : seq + 1],
                    block_tables=metadata.block_tables[seq : seq + 1],
                    slot_mapping=metadata.slot_mapping[rows],
                    query_lens_host=(query_len,),
                    seq_lens_host=(seq_len,),
                )
                assert query_len == 1 or max(metadata.query_lens_host) > 1
                out[rows] = ReferenceBackend().attend(q[rows], k[rows], v[rows], kv_layer, alone, params)
        return out


class RowByRow(ReferenceOperations):
    """Products whose rows do not depend on how many there are."""

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        return rows_apart(super().linear(weight, bias))


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> LoadedModel:
    (tiny,) = (each for each in TINY_MODELS if each.name == request.param)
    path: Path = save_tiny_model(tiny, tmp_path_factory.mktemp(request.param))
    kernels = Kernels(DeviceLengths(), RowByRow())
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


def batch_of(seqs: list[ScheduledSeq], graphs: StepGraphs | None = None) -> Batch:
    return build_batch(seqs, BLOCK_SIZE, torch.device("cpu"), shape_of=None if graphs is None else graphs.shape_of)


def mixed(rng: random.Random, *, most_seqs: int, most_tokens: int) -> list[ScheduledSeq]:
    """Decodes and chunks, some of which draw, behind contexts of any length."""
    ids, seqs, num_left = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS), [], most_tokens
    for _ in range(rng.randint(1, most_seqs)):
        query_len = min(rng.choice((1, 1, 2, 5, 11)), num_left)
        seq_len = min(40, query_len + rng.choice((0, 3, 9, 30)))
        if query_len < 1 or len(ids) * BLOCK_SIZE < seq_len:
            break
        num_left -= query_len
        tokens = tuple(TokenId(rng.randrange(VOCAB_SIZE)) for _ in range(query_len))
        table = [BlockId(ids.pop()) for _ in range(-(-seq_len // BLOCK_SIZE))]
        seqs.append(ScheduledSeq(tokens, seq_len - query_len, table, (GREEDY,) * rng.choice((0, 1, 1, 3))))
    return seqs


def forward(decoder: Forward, cache: KvCache, batch: Batch) -> torch.Tensor:
    return decoder.forward(
        StepInputs(batch.token_ids, batch.positions, cache.tensor, batch.metadata, batch.sample_rows)
    )


def captured(model: LoadedModel, cache: KvCache, capturer: CallAgain) -> StepGraphs:
    graphs = StepGraphs(model.decoder, cache.tensor, VOCAB_SIZE, LADDER)
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


@pytest.mark.parametrize("num_seqs", range(16, 257, 7))
def test_less_than_a_third_is_padding(num_seqs: int) -> None:
    padded = min(size for size in batch_sizes(256) if size >= num_seqs)
    assert padded - num_seqs < padded / 3


@pytest.mark.parametrize("most", [16, 64, 100, 512, 2048, 4096, 5000])
def test_the_last_rung_holds_the_largest_step(most: int) -> None:
    rungs = token_rungs(most)
    assert rungs[-1] >= most
    assert all(rung < most for rung in rungs[:-1])


@pytest.mark.parametrize("num_tokens", range(512, 4097, 37))
def test_beyond_512_tokens_at_most_a_fifth_is_padding(num_tokens: int) -> None:
    padded = min(rung for rung in token_rungs(4096) if rung >= num_tokens)
    assert padded - num_tokens <= padded / 5


def test_shapes_are_those_that_steps_can_have_the_largest_first() -> None:
    shapes = GraphLadder.of(2, 100, 1, 9000).within(3000).shapes
    rungs, decodes = shapes[:2], shapes[2:]
    assert rungs == (GraphShape(128, 2, 3000), GraphShape(64, 2, 3000))
    assert decodes == tuple(GraphShape(size, size, bound) for size in (2, 1) for bound in (3000, 2048))
    assert [each.is_decode for each in shapes] == [False] * 2 + [True] * 4


def test_contexts_have_few_bounds() -> None:
    assert context_bounds(1000) == (1000,)
    assert context_bounds(8192) == (2048, 8192)
    assert context_bounds(131072) == (2048, 8192, 131072)


def test_capturing_touches_no_block(model: LoadedModel, caches: tuple[KvCache, KvCache]) -> None:
    capturer = CallAgain()
    captured(model, caches[0], capturer)
    assert capturer.num_captured == NUM_SHAPES
    assert torch.equal(caches[0].tensor, caches[1].tensor)


@pytest.mark.parametrize("seq_lens", [(1,), (9, 16), (3, 17, 5), (40, 1, 2, 33, 8), (7, 7, 7, 7, 7, 7)])
def test_a_padded_step_gives_the_logits_and_the_kv_of_a_plain_one(
    model: LoadedModel, caches: tuple[KvCache, KvCache], seq_lens: tuple[int, ...]
) -> None:
    plain, padded = caches
    capturer = CallAgain()
    graphs = captured(model, padded, capturer)
    for seed in range(3):
        batch = batch_of(seqs_of(*seq_lens, seed=seed), graphs)
        expected = forward(model.decoder, plain, batch)
        assert batch.graph is not None
        assert batch.graph.shape.is_decode
        logits = graphs.run(batch)
        assert torch.equal(logits, expected)
        assert torch.equal(padded.blocks_view, plain.blocks_view)
    assert capturer.num_replayed == 3


@pytest.mark.parametrize("seed", range(20))
def test_padded_steps_of_any_kind_give_the_logits_and_every_byte_of_plain_ones(
    model: LoadedModel, caches: tuple[KvCache, KvCache], seed: int
) -> None:
    plain, padded = caches
    rng, graphs = random.Random(seed), captured(model, padded, CallAgain())
    for _ in range(4):  # one after the other, since each finds what the one before left in the static inputs
        batch = batch_of(mixed(rng, most_seqs=6, most_tokens=32), graphs)
        assert batch.graph is not None
        expected = forward(model.decoder, plain, batch)
        assert torch.equal(graphs.run(batch), expected)
        assert torch.equal(padded.blocks_view, plain.blocks_view)


@pytest.mark.parametrize("seqs", [seqs_of(9, 9, 9, 9, 9, 9), [*seqs_of(9, 9), *seqs_of(30, query_len=9)]])
def test_what_an_earlier_step_left_is_not_written_in_a_smaller_one(
    model: LoadedModel, caches: tuple[KvCache, KvCache], seqs: list[ScheduledSeq]
) -> None:
    _, cache = caches
    graphs = captured(model, cache, CallAgain())
    graphs.run(batch_of(seqs, graphs))
    cache.fill_poison()
    (seq, *_) = seqs_of(1, 9, 9, seed=5)
    smaller = [seq, *seqs_of(1, 1, 1, seed=6)[1:]]
    for others in (smaller, [each._replace(samples=()) for each in smaller]):  # a decode, and a rung
        graphs.run(batch_of(others, graphs))
        written = {int(each.block_table[0]) for each in others}
        untouched = [block for block in range(NUM_BLOCKS) if block not in written]
        assert bool(cache.tensor[untouched].isnan().all())


@pytest.mark.parametrize(
    ("seqs", "shape"),
    [
        (seqs_of(8), (1, 1, 16)),
        (seqs_of(8, 8, 17), (4, 4, 40)),
        (seqs_of(8, query_len=3), (8, 6, 40)),
        ([*seqs_of(8), *seqs_of(20, query_len=8)], (12, 6, 40)),
        ([seq._replace(samples=()) for seq in seqs_of(8)], (8, 6, 40)),
        (seqs_of(*(3,) * 7), None),
        ([*seqs_of(*(3,) * 6), *seqs_of(8, query_len=3)], None),
        (seqs_of(41), None),
        (seqs_of(40, query_len=33), None),
    ],
    ids=["decode", "longer", "prompt", "mixed", "no draw", "many", "many mixed", "too long", "too large"],
)
def test_a_step_has_the_smallest_shape_that_holds_it(
    model: LoadedModel,
    caches: tuple[KvCache, KvCache],
    seqs: list[ScheduledSeq],
    shape: tuple[int, int, int] | None,
) -> None:
    graph = batch_of(seqs, captured(model, caches[0], CallAgain())).graph
    assert (None if graph is None else graph.shape) == (None if shape is None else GraphShape(*shape))


def test_a_scored_step_has_no_graph(model: LoadedModel, caches: tuple[KvCache, KvCache]) -> None:
    (seq,) = seqs_of(8, query_len=4)
    seq = seq._replace(scored=ScoredTokens(seq.token_ids[1:], 0, 0))
    assert batch_of([seq], captured(model, caches[0], CallAgain())).graph is None


@pytest.mark.parametrize("says", [torch.OutOfMemoryError, RuntimeError], ids=["torch", "driver"])
def test_the_largest_shapes_are_refused_first_where_memory_is_short(
    model: LoadedModel, caches: tuple[KvCache, KvCache], says: type[RuntimeError]
) -> None:
    graphs = captured(model, caches[0], CallAgain(refuses=4, says=says))  # rungs of 32, 12 and 8 tokens, 6 decodes
    assert (graphs.num_captured, graphs.num_refused, graphs.rungs) == (NUM_SHAPES - 4, 4, ())
    assert batch_of(seqs_of(8, query_len=3), graphs).graph is None
    assert batch_of(seqs_of(3, 3, 3), graphs).graph is not None
    shown = graphs.decision(None)
    assert shown.value == f"7 of {NUM_SHAPES}: decodes of up to 6 sequences, other steps of up to 0 tokens"
    assert "memory" in shown.why


def test_kernels_that_cannot_be_captured_are_no_reason_to_stop(
    model: LoadedModel, caches: tuple[KvCache, KvCache]
) -> None:
    graphs = captured(model, caches[0], CallAgain(broken=range(100)))
    assert batch_of(seqs_of(3), graphs).graph is None
    assert (graphs.num_captured, graphs.rungs, graphs.decision(None).value) == (0, (), "none")
    assert "not permitted" in graphs.decision(512).why


def test_decodes_are_captured_though_a_kernel_of_prompts_cannot_be(
    model: LoadedModel, caches: tuple[KvCache, KvCache]
) -> None:
    graphs = captured(model, caches[0], CallAgain(broken=(2,)))  # the second largest rung
    assert (graphs.num_captured, graphs.num_refused, graphs.rungs) == (NUM_SHAPES - 3, 3, ())
    assert batch_of(seqs_of(8, query_len=3), graphs).graph is None
    assert batch_of(seqs_of(3), graphs).graph is not None


def test_the_runner_takes_the_same_tokens_from_either(model: LoadedModel, caches: tuple[KvCache, KvCache]) -> None:
    plain, padded = caches
    capturer = CallAgain()
    graphed = Runner(model.decoder, padded, graphs=captured(model, padded, capturer))
    for seqs in (seqs_of(6, 6, query_len=6), seqs_of(7, 7, 12), seqs_of(20), seqs_of(39, query_len=39)):
        step = Step(tuple(seqs))
        assert graphed.run(step).outputs == Runner(model.decoder, plain).run(step).outputs
    assert capturer.num_replayed == 3


@needs_gpu
def test_a_gpu_replays_the_logits_of_a_plain_step(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    path = save_tiny_model(TINY_MODELS[0], tmp_path)
    loaded = load_model(path, "bfloat16", device, select_kernels("auto", device, torch.bfloat16))
    cache = KvCache.create(loaded.kv_layout(16), 512, device)
    cache.tensor.normal_()
    capturer = CudaCapturer(device)
    graphs = StepGraphs(loaded.decoder, cache.tensor, VOCAB_SIZE, GraphLadder.of(8, 256, 8, 4096))
    rng = random.Random(0)
    graphs.capture(capturer)
    assert capturer.num_bytes < 1 << 30
    with torch.inference_mode():
        for num_seqs, query_len in ((1, 1), (3, 1), (8, 1), (2, 1), (1, 100), (8, 20), (5, 3)):
            ids = rng.sample(range(512), 512)
            seqs = [
                ScheduledSeq(
                    (TokenId(7 + i),) * (query_len if i else 1),
                    length,
                    [BlockId(ids.pop()) for _ in range((length + query_len) // 16 + 1)],
                    (GREEDY,),
                )
                for i, length in enumerate(rng.choices(range(900), k=num_seqs))
            ]
            batch = build_batch(seqs, 16, device, shape_of=graphs.shape_of)
            replayed = graphs.run(batch).clone()
            torch.testing.assert_close(replayed, forward(loaded.decoder, cache, batch).float(), atol=0.1, rtol=0.1)
    cache.close()
