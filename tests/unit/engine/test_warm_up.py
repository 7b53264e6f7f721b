"""Warm-up takes a step of every kind, as large as steps become, within the context and over a pool of its own."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from engine.chunking import ChunkTokens
from engine.memory import blocks_that_fit, check_memory
from engine.warm_up import StepSizes, warm_up, warm_up_steps
from kernels.operations import Kernels
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from shell.config import WorkerConfig
from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout
from tests.decode_rows import seqs_of

LAYOUT = KvLayout(1, 1, 4, 2, DType.FLOAT32)
KERNELS = Kernels(ReferenceBackend(), ReferenceOperations())
GPU = torch.device("cuda", 0)


def test_steps_are_as_large_as_they_become():
    _, steps = warm_up_steps(StepSizes(chunk_tokens=64, max_seqs=4, context_tokens=1000), block_size=16)
    kinds = [(len(seqs_of(step)), len(seqs_of(step)[0].token_ids), seqs_of(step)[0].context_len) for step in steps]
    assert kinds[:3] == [(1, 64, 0), (4, 1, 80), (4, 16, 64)]
    between = [step for tokens in (16, 32, 64, 64) for step in ((1, tokens, 0), (4, 1, 80))]
    assert kinds[3:] == [*between, (5, 1, 80), (4, 1, 80), (4, 1, 80), (1, 1, 80)]
    draws = [[sample.params.temperature for sample in seqs_of(step)[0].samples] for step in steps]
    assert draws == [[], [0.0], [0.0], *[[], [0.0]] * 4, [0.0], [0.0], [1.0], [1.0]]
    assert sum(len(step.copies) for step in steps) == 1
    assert sum(seq.scored is not None for step in steps for seq in seqs_of(step)) == 5


@pytest.mark.parametrize("context_tokens", [40, 300, 514, 1026, 5000])
@pytest.mark.parametrize("max_seqs", [1, 16, 64, 200])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 64, 512, 2048])
def test_steps_have_as_many_tokens_as_each_kind_of_product_that_serving_needs(chunk_tokens, max_seqs, context_tokens):
    tiles = pytest.importorskip("kernels.triton.quantized")._TILES
    largest = min(chunk_tokens + max_seqs - 1, max_seqs * (context_tokens - 1))
    _, steps = warm_up_steps(StepSizes(chunk_tokens, max_seqs, context_tokens), block_size=16)
    totals = [sum(len(seq.token_ids) for seq in seqs_of(step)) for step in steps]
    for least, most in pairwise((0, *(tile.most_tokens for tile in tiles), 1 << 30)):
        if largest > least:
            assert any(least < total <= most for total in totals), (least, totals)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("context_tokens", [4, 5, 16, 100, 5000])
@pytest.mark.parametrize(("chunk_tokens", "max_seqs"), [(1, 64), (16, 64), (2048, 1), (512, 64)])
def test_no_step_goes_beyond_the_context_or_its_blocks(chunk_tokens, max_seqs, context_tokens, block_size):
    num_blocks, steps = warm_up_steps(StepSizes(chunk_tokens, max_seqs, context_tokens), block_size)
    for seq in (seq for step in steps for seq in seqs_of(step)):
        length = seq.context_len + len(seq.token_ids)
        assert length <= context_tokens
        assert length <= len(seq.block_table) * block_size
        assert max(seq.block_table) < num_blocks - 1  # the last one is for the copy


def test_a_runner_takes_the_steps(decoder):
    model = SimpleNamespace(decoder=decoder, device=torch.device("cpu"))
    assert warm_up(model, KERNELS, LAYOUT, StepSizes(chunk_tokens=8, max_seqs=2, context_tokens=64)) == 0


def test_a_chunk_that_does_not_fit_into_the_device_is_refused_by_its_option():
    class Full:
        def forward(self, *_):
            raise torch.OutOfMemoryError("out of memory")

    model = SimpleNamespace(decoder=Full(), device=torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        warm_up(model, KERNELS, LAYOUT, StepSizes(chunk_tokens=8, max_seqs=2, context_tokens=64))
    assert caught.value.field == "--chunk-tokens"


def test_the_pool_leaves_what_steps_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000_000, 2_000_000))
    blocks = 1_000_000 * 0.9
    assert blocks_that_fit(WorkerConfig(), LAYOUT, GPU, 1 << 30) == blocks // LAYOUT.block_bytes
    assert (
        blocks_that_fit(WorkerConfig(), LAYOUT, GPU, 1 << 30, step_bytes=200_000)
        == (blocks - 200_000) // LAYOUT.block_bytes
    )
    with pytest.raises(ConfigError):
        blocks_that_fit(WorkerConfig(), LAYOUT, GPU, 1 << 30, step_bytes=900_000)
    wanted = 900_000 // LAYOUT.block_bytes
    check_memory(LAYOUT, wanted, GPU, step_bytes=100_000)
    with pytest.raises(ConfigError):
        check_memory(LAYOUT, wanted, GPU, step_bytes=200_000)


@pytest.mark.parametrize(
    ("asked", "device", "full_tokens", "expected"),
    [
        (0, "cpu", None, (512, 512)),
        (0, "cpu", 128, (512, 128)),
        (0, "cuda", None, (2048, 4096)),
        (100, "cpu", 128, (100, 100)),
        (200, "cpu", 128, (200, 200)),
        (100, "cuda", None, (100, 100)),
    ],
)
def test_chunks_keep_the_device_busy_unless_a_length_was_asked_for(asked, device, full_tokens, expected):
    chunk_tokens = ChunkTokens.of(asked, torch.device(device), full_tokens)
    assert (chunk_tokens.beside, chunk_tokens.alone) == expected
