"""The Triton attention against float64, interpreted on the CPU or compiled on a GPU.

Slots that hold no token are NaN in every case (`oracle.Case`), so whatever is read beyond a seq shows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels.attention import AttentionMetadata
from tandem.errors import InternalError
from tests.kernels.devices import HAS_GPU, on_a_gpu, on_each_device
from tests.kernels.oracle import LENS, QUANTIZED, TOLERANCES, Case

pytest.importorskip("triton")

from kernels.triton import decode
from kernels.triton.attention import TritonAttention
from kernels.triton.decode import MAX_SPLITS, MIN_SPLIT, num_programs

BACKEND = TritonAttention()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(1, 9), (17, 17), (1, 33), (15, 48), (1, 1), (16, 31)]


def with_dtypes(values):
    """Each of `values` with each dtype; interpreted, which takes long, with float32 and one of the others in turn."""
    if HAS_GPU:
        return list(product(values, DTYPES))
    return [pair for place, value in enumerate(values) for pair in ((value, DTYPES[0]), (value, DTYPES[1 + place % 2]))]


@on_each_device
@pytest.mark.parametrize(("kind", "dtype"), with_dtypes(LENS), ids=str)
def test_each_kind_of_batch_is_exact_in_each_dtype(kind, dtype, device):
    Case(LENS[kind], 16, dtype=dtype, head_dim=64).to(device).check(BACKEND)


@on_each_device
@pytest.mark.parametrize(("head_dim", "dtype"), with_dtypes([8, 64, 80, 96, 128, 256]), ids=str)
def test_each_head_dim_is_exact(head_dim, dtype, device):
    Case(MIXED, 16, head_dim=head_dim, dtype=dtype).to(device).check(BACKEND)


@on_each_device
@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize(("block_size", "dtype"), list(zip((3, 16, 64), DTYPES, strict=True)), ids=str)
def test_quantized_kv_is_read_as_it_is_stored(block_size, dtype, kv_dtype, device):
    lens = [*LENS["mixed"], (70, 75), (1, MIN_SPLIT + 1)]
    case = Case(lens, block_size, (2, 1), head_dim=80, dtype=dtype, kv_dtype=kv_dtype).to(device)
    case.check(BACKEND)
    Case(LENS["mixed"], block_size, (2, 1), 16, dtype, kv_dtype=kv_dtype).to(device).check(BACKEND, 7, 30.0)


@on_each_device
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (7, 1), (32, 2), (20, 1)], ids=str)
def test_each_group_of_heads_is_exact(heads, device):
    Case(MIXED, 16, heads, head_dim=64).to(device).check(BACKEND)


@on_each_device
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_each_block_size_is_exact(block_size, device):
    Case([*MIXED, (5, 300), (1, 300)], block_size, head_dim=64).to(device).check(BACKEND)


@on_each_device
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 129])
def test_lengths_beside_a_tile_s_edge_are_exact(length, device):
    lens = [(length, length), (1, length), (2, length + 1), (length, 2 * length), (length, length + 64)]
    Case(lens, 16, (2, 1), head_dim=64).to(device).check(BACKEND)


@on_each_device
@pytest.mark.parametrize("window", [1, 16, 64, 130, 1000])
def test_a_query_sees_its_window_and_no_more(window, device):
    lens = [*MIXED, (130, 130), (70, 270), (1, 300), (40, 191), (1, 1100)]
    Case(lens, 16, (2, 1), head_dim=64).to(device).check(BACKEND, window)


@on_each_device
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_scores_are_capped(soft_cap, window, device):
    Case(MIXED, 16, head_dim=64).to(device).check(BACKEND, window, soft_cap)


@on_each_device
@pytest.mark.parametrize("window", [None, 37])
def test_a_sink_takes_its_share_of_the_softmax_once(window, device):
    Case([*MIXED, (1, 2 * MIN_SPLIT + 9)], 16, (6, 2), head_dim=64).to(device).check(BACKEND, window, sunk=True)


@on_each_device
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (80, 2000)])
def test_long_contexts_are_exact_over_their_splits(head_dim, window, device):
    longest = MIN_SPLIT * MAX_SPLITS + 77  # splits of more than MIN_SPLIT
    lens = [(1, 4095), (1, MIN_SPLIT), (1, MIN_SPLIT + 1), (1, longest), (1, 3)]
    Case(lens, 16, (2, 1), head_dim=head_dim).to(device).check(BACKEND, window)


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_long_prompts_and_chunks_are_exact(head_dim, dtype, device):
    lens = [(1000, 4095), (511, 511), (1, 4095), (130, 1024)]
    Case(lens, 16, (8, 2), head_dim=head_dim, dtype=dtype).to(device).check(BACKEND)


@on_each_device
def test_queries_keys_and_values_may_be_views_of_one_tensor(device):
    case = Case(MIXED, 16, head_dim=64)
    heads = torch.cat((case.q, case.k, case.v), dim=1)  # [T, H + 2 * Hkv, D]
    wide = torch.full((len(heads) + 2, heads.shape[1] + 3, 64), torch.nan)
    qkv = wide[1:-1, 1:-2]
    qkv.copy_(heads)
    case.to(device)
    qkv = wide.to(device)[1:-1, 1:-2]
    case.q, case.k, case.v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    case.check(BACKEND)


@on_each_device
def test_a_seq_is_computed_alike_whoever_shares_its_step(device):
    long = (1, MIN_SPLIT + 40)
    together = Case([long, (1, 30), (1, 5 * MIN_SPLIT), (20, 20)], 16, head_dim=64).to(device)
    shared = together.attend(BACKEND)
    for row, (lens, table) in enumerate(zip(together.lens[:3], together.tables[:3], strict=True)):
        alone = replace(
            together.metadata,
            cu_seqlens_q=together.metadata.cu_seqlens_q[:2],
            seq_lens=together.metadata.seq_lens[row : row + 1],
            block_tables=torch.tensor([table], dtype=torch.int32, device=device),
            query_lens_host=(1,),
            seq_lens_host=(lens[1],),
        )
        lonely = Case([lens], 16, head_dim=64).to(device)
        lonely.metadata, lonely.kv_layer = alone, together.kv_layer
        lonely.q, lonely.k, lonely.v = (x[row : row + 1] for x in (together.q, together.k, together.v))
        assert torch.equal(lonely.attend(BACKEND), shared[row : row + 1])


@on_each_device
def test_a_result_does_not_depend_on_how_many_programs_share_the_splits(device, monkeypatch):
    monkeypatch.setattr(decode, "_COUNTED", 16)
    lens = [*[(1, 3)] * 18, (2, 9), (1, 5 * MIN_SPLIT + 1), (1, MIN_SPLIT)]  # more than are counted out together
    case = Case(lens, 16, (2, 1), head_dim=64).to(device)
    want = case.check(BACKEND)
    for programs in (1, 5, 40):
        monkeypatch.setattr(decode, "num_programs", lambda *_, programs=programs: programs)
        assert torch.equal(case.attend(BACKEND), want), programs


def test_programs_are_no_more_than_fill_the_device(monkeypatch):
    monkeypatch.setattr(decode, "_num_multiprocessors", lambda _: 132)
    device = torch.device("cuda", 0)
    assert num_programs(device, num_tiles=8, most_splits=256 * MAX_SPLITS) * 8 == 8 * 132
    assert num_programs(device, num_tiles=8, most_splits=3) == 3
    assert num_programs(device, num_tiles=10_000, most_splits=3) == 1


def with_empty_seqs(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same batch with a seq that computes nothing before and after each."""
    starts = metadata.cu_seqlens_q.repeat_interleave(2)
    count = len(metadata.seq_lens_host)
    seq_lens = torch.zeros(2 * count + 1, dtype=torch.int32, device=starts.device)
    seq_lens[1::2] = metadata.seq_lens
    tables = torch.full((2 * count + 1, metadata.block_tables.shape[1]), -1, dtype=torch.int32, device=starts.device)
    tables[1::2] = metadata.block_tables
    return replace(
        metadata,
        cu_seqlens_q=starts,
        seq_lens=seq_lens,
        block_tables=tables,
        query_lens_host=(*(n for query_len in metadata.query_lens_host for n in (0, query_len)), 0),
        seq_lens_host=(*(n for seq_len in metadata.seq_lens_host for n in (0, seq_len)), 0),
    )


@on_each_device
def test_seqs_that_compute_nothing_are_passed_over(device):
    case = Case(MIXED, 16, head_dim=64).to(device)
    case.metadata = with_empty_seqs(case.metadata)
    case.check(BACKEND)


@on_each_device
def test_a_padded_row_of_a_decode_step_comes_out_as_zeros(device):
    case = Case(LENS["decode"], 16, head_dim=64).to(device)
    want = case.attend(BACKEND)
    case.metadata.seq_lens[2] = 0
    case.metadata.block_tables[2] = -1
    want[2] = 0
    assert torch.equal(case.attend(BACKEND), want)


@on_a_gpu
def test_a_captured_step_serves_any_lengths_up_to_its_bound(device):
    lens = [(1, 700), (1, 33), (1, 2000), (1, 1)]
    case = Case(lens, 16, (8, 2), head_dim=128, dtype=torch.bfloat16).to(device)
    lengths = case.metadata.seq_lens.clone()
    case.metadata.seq_lens.fill_(1)
    case.metadata = replace(case.metadata, seq_lens_host=(4096,) * len(lens))
    case.attend(BACKEND)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.attend(BACKEND)
    case.metadata.seq_lens.copy_(lengths)
    graph.replay()
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(out.double().cpu(), case.oracle(), atol=tolerance, rtol=tolerance)


WRONG = {
    "q: dtype": {"q": lambda q: q.double()},
    "q: D is 4, elsewhere 8": {"q": lambda q: q[..., :4]},
    "q: 3 heads do not divide into 2 KV heads": {"q": lambda q: q[:, :3]},
    "k: T is 4": {"k": lambda k: k[:-1]},
    "k: Hkv is 1": {"k": lambda k: k[:, :1]},
    "v: last dimension has stride": {"v": lambda v: v.mT.contiguous().mT},
    "v: dtype": {"v": lambda v: v.half()},
    "kv_layer: last dimension has stride": {"kv_layer": lambda kv: kv.mT.contiguous().mT},
    "kv_layer: KV is 1": {"kv_layer": lambda kv: kv[:, :1]},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    case = Case(LENS["decode"], 16)
    for name, change in WRONG[message].items():
        setattr(case, name, change(getattr(case, name)))
    with pytest.raises(InternalError, match=message):
        case.attend(BACKEND)


def test_a_head_too_wide_for_the_tables_is_named():
    with pytest.raises(InternalError, match="head_dim: 320"):
        Case(LENS["decode"], 16, head_dim=320).attend(BACKEND)
