"""Captured steps in Triton's kernels: padding changes no logits and no byte of the pool, whatever the batch is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from engine.batch import build_batch
from engine.draws import SampleSpec
from engine.graph_shapes import GraphLadder
from engine.graphs import StepGraphs
from engine.kv_cache import KvCache
from engine.step import ScheduledSeq
from kernels import triton
from kernels.compiled_step import StepInputs
from models.loading import load_model
from tandem.types import BlockId, SamplingParams, TokenId
from tests.replays import CallAgain, rows_apart

pytest.importorskip("triton")

from kernels.triton.operations import TritonOperations

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's on infinities, in the interpreter
BLOCK_SIZE, NUM_BLOCKS, CONTEXT = 16, 64, 400
LADDER = GraphLadder((4,), (16, 48), 5, (CONTEXT,))
CPU = torch.device("cpu")
DRAW = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0)


class RowByRow(TritonOperations):
    def linear(self, weight, bias):
        return rows_apart(super().linear(weight, bias))


def batches(rng: random.Random) -> list[list[ScheduledSeq]]:
    """Prompts, chunks behind contexts of a split and more, decodes; the last one after a step that left more behind."""
    lens = [[(1, 300), (7, 7), (20, 33), (1, 5)], [(1, 17), (1, 260), (1, 1)], [(3, 290), (1, 40)], [(16, 16)]]
    made = []
    for batch in lens:
        ids = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        seqs = []
        for query_len, seq_len in batch:
            table = [BlockId(ids.pop()) for _ in range(-(-seq_len // BLOCK_SIZE))]
            tokens = tuple(TokenId(rng.randrange(VOCAB_SIZE)) for _ in range(query_len))
            seqs.append(ScheduledSeq(tokens, seq_len - query_len, table, (DRAW,)))
        made.append(seqs)
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures: tests/unit/engine/test_graphs.py")
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])  # plain; experts, windows, sinks
@torch.inference_mode()
def test_a_padded_step_is_a_plain_one_bit_by_bit(name, tmp_path):
    kernels = replace(triton.load(), operations=RowByRow())
    (tiny,) = (each for each in TINY_MODELS if each.name == name)
    model = load_model(save_tiny_model(tiny, tmp_path), "float32", CPU, kernels)
    plain, padded = (KvCache.create(model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, CPU) for _ in range(2))
    for cache in (plain, padded):
        cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(1)))
    graphs = StepGraphs(model.decoder, padded.tensor, VOCAB_SIZE, LADDER)
    graphs.capture(CallAgain())
    assert torch.equal(padded.blocks_view, plain.blocks_view)
    for seqs in batches(random.Random(0)):
        batch = build_batch(seqs, BLOCK_SIZE, CPU, shape_of=graphs.shape_of)
        inputs = StepInputs(batch.token_ids, batch.positions, plain.tensor, batch.metadata, batch.sample_rows)
        expected, found = model.decoder.forward(inputs), graphs.run(batch)
        assert torch.equal(found, expected)
        assert torch.equal(padded.blocks_view, plain.blocks_view)
    for cache in (plain, padded):
        cache.close()
