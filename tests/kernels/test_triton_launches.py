"""Serving compiles nothing: whatever a step launches, the warm-up has launched a kernel with the same types before."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, save_tiny_model
from engine.draws import SampleSpec
from engine.graph_shapes import GraphLadder
from engine.graphs import StepGraphs
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.step import BlockCopy, ScheduledSeq, Step
from engine.warm_up import StepSizes, warm_up
from kernels import triton
from kernels.quantized import QuantForm
from models.loading import load_model
from tandem.kv_layout import QuantDType
from tandem.types import BlockId, SamplingParams, TokenId
from tests.kernels.devices import on_each_device
from tests.kernels.oracle import Case

pytest.importorskip("triton")

from triton import knobs

from kernels.triton.attention import TritonAttention
from kernels.triton.compilations import warn_from_now_on
from kernels.triton.decode import MIN_SPLIT
from tests.kernels.recorded_launches import OPTIONS, recorded
from tests.replays import CallAgain

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's on infinities, in the interpreter
BLOCK_SIZE, NUM_BLOCKS = 16, 48
SIZES = StepSizes(chunk_tokens=2 * MIN_SPLIT, max_seqs=5, context_tokens=3 * MIN_SPLIT)
LADDER = GraphLadder.of(SIZES.max_seqs, SIZES.chunk_tokens, SIZES.max_seqs, SIZES.context_tokens)
DRAWS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1})


def served_steps(rng: random.Random) -> list[Step]:
    """Prompts, chunks and decode steps of many lengths, with and without draws and copies."""
    lens = [(1, 1), (7, 7), (16, 40), (3, 300), (1, MIN_SPLIT), (1, 2 * MIN_SPLIT + 1), (1, 33)]
    batches = [[each] for each in lens] + [rng.sample(lens, count) for count in (2, 3, 4, 5)]
    batches += [[(20, 20)], [(100, 100), (1, 33)], [(2 * MIN_SPLIT, 2 * MIN_SPLIT), (1, 33), (1, 7)]]
    steps = []
    for number, batch in enumerate(batches):
        ids = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        seqs = []
        for query_len, seq_len in batch:
            table = tuple(BlockId(ids.pop()) for _ in range(-(-seq_len // BLOCK_SIZE)) if ids)
            if len(table) * BLOCK_SIZE < seq_len:
                break
            spec = SampleSpec(SamplingParams(max_tokens=1, **rng.choice(DRAWS)), output_index=0)
            seqs.append(ScheduledSeq((TokenId(1),) * query_len, seq_len - query_len, table, (spec,) * (number % 3 > 0)))
        copies = (BlockCopy(BlockId(ids[0]), BlockId(ids[1])),) if number % 2 and len(ids) > 1 else ()
        steps.append(Step(tuple(seqs), copies))
    return steps


@on_each_device
@pytest.mark.parametrize(
    ("name", "weights", "kv_dtype"),
    [
        ("llama", None, None),
        ("gemma2-caps", None, None),  # windows too
        ("gpt-oss", None, None),  # sinks
        *(("llama", form, None) for form in QuantForm),
        ("qwen3-moe", QuantForm.INT4, None),
        *(("llama", None, kv_dtype) for kv_dtype in QuantDType),
    ],
)
def test_serving_launches_what_the_warm_up_has_compiled(device, name, weights, kv_dtype, tmp_path):
    device, kernels = torch.device(device), triton.load()
    (tiny,) = (each for each in TINY_MODELS if each.name == name)
    dtype = "float32" if weights is None else "bfloat16"
    model = load_model(save_tiny_model(tiny, tmp_path), dtype, device, kernels, weights)
    layout = model.kv_layout(BLOCK_SIZE, kv_dtype)
    with recorded() as warm:
        warm_up(model, kernels, layout, SIZES, LADDER)
    cache = KvCache.create(layout, NUM_BLOCKS, device)
    cache.blocks_view.zero_()
    with recorded() as served:
        graphs = StepGraphs(model.decoder, cache.tensor, model.config.vocab_size, LADDER)
        graphs.capture(CallAgain())
        for step in served_steps(random.Random(0)):
            Runner(model.decoder, cache, kernels).run(step)
            Runner(model.decoder, cache, kernels, graphs).run(step)
    assert graphs.num_captured == len(LADDER.shapes)
    cache.close()
    assert {launch.kernel for launch in served} >= {"decode_kernel", "merge_kernel", "prefill_kernel", "_copy_words"}
    assert not served - warm
    assert all({name for name, _ in launch.options} >= OPTIONS for launch in warm)


def attend(**changes):
    with recorded() as launches:
        case = Case([(1, 9), (3, 17), (1, MIN_SPLIT + 1)], **{"block_size": 16, "head_dim": 16, **changes})
        case.attend(TritonAttention())
    return launches


def test_slices_of_index_tensors_are_compiled_for_like_whole_ones():
    whole = attend()
    case = Case([(1, 9), (1, 9), (3, 17), (1, MIN_SPLIT + 1)], 16, head_dim=16)
    metadata = case.metadata
    rest = replace(
        metadata,
        cu_seqlens_q=torch.cat((torch.zeros(1, dtype=torch.int32), metadata.cu_seqlens_q[1:] - 1))[1:],
        seq_lens=metadata.seq_lens[1:],
        block_tables=metadata.block_tables[1:, 1:],
        query_lens_host=metadata.query_lens_host[1:],
        seq_lens_host=metadata.seq_lens_host[1:],
    )
    assert rest.seq_lens.data_ptr() % 16
    case.metadata, case.q, case.k, case.v = rest, case.q[1:], case.k[1:], case.v[1:]
    with recorded() as sliced:
        case.attend(TritonAttention())
    assert sliced == whole


def test_another_shape_shows_as_another_compilation():
    assert attend(block_size=32) != attend()
    assert attend(dtype=torch.bfloat16) != attend()


def test_a_compilation_while_serving_is_logged_with_its_kernel(monkeypatch, caplog):
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    warn_from_now_on()
    hook = knobs.runtime.jit_post_compile_hook
    hook(key="", repr="decode_kernel[…]", fn=SimpleNamespace(name="decode_kernel"), compile={}, already_compiled=False)
    assert "a kernel was compiled while serving" in caplog.text
    assert "decode_kernel" in str(vars(caplog.records[-1]))
