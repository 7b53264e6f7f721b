"""The native CPU attention against attention written out in float64, in every tier that this machine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionParams
from kernels.cpu.attention import CpuAttention
from kernels.cpu.library import Library
from tandem.errors import InternalError
from tests.kernels.oracle import LENS, QUANTIZED, Case
from tests.kernels.tiers import TIERS, libraries

pytestmark = pytest.mark.native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EDGES = [(1, 15), (1, 16), (17, 17), (0, 9), (16, 31), (1, 300)]


@pytest.fixture(scope="module")
def backends():
    return {tier: CpuAttention(library) for tier, library in libraries().items()}


@pytest.fixture(params=TIERS)
def backend(request, backends):
    return backends[request.param]


@pytest.fixture(scope="module")
def best():
    return CpuAttention(Library())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [*LENS.values(), EDGES], ids=[*LENS, "edges"])
def test_matches_the_oracle_on_ragged_batches(backends, lens, dtype):
    Case(lens, 16, (6, 2), 64, dtype).check_each(backends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 13, 20, 80, 96, 128, 256])
def test_matches_the_oracle_at_every_head_dim(backends, head_dim, dtype):
    Case([(1, 35), (9, 40)], 16, (6, 2), head_dim, dtype).check_each(backends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(n, 1) for n in (1, 2, 3, 4, 5, 7, 8, 16, 20)] + [(9, 3), (8, 8), (40, 8)], ids=str)
def test_matches_the_oracle_at_every_group(backends, heads, dtype):
    Case([(1, 35), (9, 20)], 16, heads, 32, dtype).check_each(backends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 64, 256])
def test_matches_the_oracle_at_every_block_size(backends, block_size, dtype):
    Case([(1, 70), (20, 70)], block_size, (6, 2), 64, dtype).check_each(backends, window=37)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (16, None), (100, None), (None, 0.5), (7, 30.0)])
def test_matches_the_oracle_with_window_and_soft_cap(backends, window, soft_cap, dtype):
    Case(LENS["mixed"] + EDGES, 16, (6, 2), 32, dtype).check_each(backends, window, soft_cap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_matches_the_oracle_over_several_shares_and_blocks_of_keys(backends, window, dtype):
    Case([(1, 700), (5, 700), (1, 129), (1, 128)], 16, (3, 1), 64, dtype).check_each(backends, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (20, 4), (16, 2)], ids=str)
def test_sinks_match_the_oracle_at_every_group_and_over_several_shares(backends, heads, dtype):
    case = Case([(1, 700), (5, 700), (1, 9), (12, 12), (1, 1)], 16, heads, 32, dtype)
    case.check_each(backends, sunk=True)
    case.check_each(backends, window=37, sunk=True)


def test_sinks_of_each_layer_are_its_own(best):
    case = Case(LENS["mixed"], 16)
    plain = case.attend(best)
    case.check(best, sunk=True)
    torch.testing.assert_close(case.attend(best), plain, rtol=0, atol=0)


def test_matches_the_oracle_on_long_contexts(best):
    for dtype in DTYPES:
        Case([(1, 4095), (2, 4095)], 16, (3, 1), 64, dtype).check(best)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)).map(lambda t: (t[0], max(1, sum(t)))), min_size=1),
    block_size=st.sampled_from([1, 5, 16, 32]),
    heads=st.sampled_from([(3, 3), (9, 3), (8, 1), (6, 2)]),
    head_dim=st.sampled_from([16, 20, 32, 64]),
    window=st.none() | st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    tier=st.sampled_from(TIERS),
)
def test_matches_the_oracle_on_any_batch(lens, block_size, heads, head_dim, window, dtype, tier):
    case = Case(lens, block_size, heads, head_dim, dtype)
    if len(case.q):
        case.check(CpuAttention(Library(tier)), window)


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64, 80, 256])
def test_quantized_kv_matches_the_oracle_at_every_head_dim(backends, head_dim, dtype, kv_dtype):
    Case(EDGES + LENS["mixed"], 16, (6, 2), head_dim, dtype, kv_dtype=kv_dtype).check_each(backends)


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (5, 1), (9, 3), (16, 2)], ids=str)
def test_quantized_kv_matches_the_oracle_at_every_group(backends, heads, dtype, kv_dtype):
    case = Case([(1, 135), (9, 20), (1, 129), (5, 300)], 4, heads, 32, dtype, kv_dtype=kv_dtype)
    case.check_each(backends)
    case.check_each(backends, window=37, soft_cap=30.0)


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_quantized_kv_matches_the_oracle_over_several_shares_and_blocks_of_keys(backends, block_size, kv_dtype):
    for dtype in DTYPES:
        Case([(1, 700), (5, 700), (1, 129)], block_size, (3, 1), 64, dtype, kv_dtype=kv_dtype).check_each(backends)


def test_a_decode_step_over_int8_is_as_close_to_the_oracle_as_over_bfloat16(best):
    errors = []
    for kv_dtype in (torch.int8, None):
        case = Case([(1, 900)] * 4, 16, (9, 3), 64, torch.bfloat16, kv_dtype=kv_dtype)
        errors.append((case.attend(best).double() - case.oracle()).pow(2).mean().sqrt())
    assert errors[0] <= 1.1 * errors[1]  # what is left is the rounding of the result


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_strided_over_tokens(backend, dtype):
    case = Case(LENS["mixed"], 16, (6, 2), 32, dtype)
    expected = case.attend(backend)
    wide = torch.full((len(case.q), 10, 32), torch.nan, dtype=dtype)
    wide[:, :6] = case.q
    case.q = wide[:, :6]
    assert torch.equal(case.attend(backend), expected)


@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 90])
def test_a_seq_gets_the_same_bits_alone_as_in_a_crowd(backends, window, dtype, kv_dtype):
    lens = [(1, 700), (40, 300), (1, 9), (64, 64), (1, 129)]
    crowd = Case(lens, 16, (6, 2), 64, dtype, kv_dtype=kv_dtype)
    together = {tier: crowd.attend(backend, window) for tier, backend in backends.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        for tier, backend in backends.items():
            assert torch.equal(crowd.attend(backend, window), together[tier]), tier
    finally:
        torch.set_num_threads(threads)
    for i, first in enumerate(crowd.metadata.cu_seqlens_q[:-1].tolist()):
        seq = alone(crowd, i)
        for tier, backend in backends.items():
            assert torch.equal(seq.attend(backend, window), together[tier][first : first + lens[i][0]]), (tier, i)


@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_gets_the_same_bits_wherever_it_is_cut_into_chunks(backends, dtype, kv_dtype):
    whole = Case([(700, 700)], 16, (6, 2), 64, dtype, kv_dtype=kv_dtype)
    expected = {tier: whole.attend(backend) for tier, backend in backends.items()}
    for first, last in [(0, 2), (2, 45), (45, 301), (301, 555), (555, 700)]:
        part_of_it = chunk(whole, first, last)
        for tier, backend in backends.items():
            assert torch.equal(part_of_it.attend(backend), expected[tier][first:last]), (tier, first)


def test_what_a_prompt_attends_to_keeps_its_weight_however_many_keys_follow(backends):
    case = Case([(2, 12288)], 16, (1, 1), 16, torch.bfloat16)
    value = 0.99609375  # in bfloat16, too
    case.q[:], case.k[:], case.v[:] = 1.0, 0.0, value
    case.kv_layer[:, 0], case.kv_layer[:, 1] = 0.0, value
    case.kv_layer[case.tables[0][: 256 // 16], 0] = 3.0  # a score of 12
    for tier, backend in backends.items():
        assert (case.attend(backend) == value).all(), tier


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("query_len", [1, 3])
def test_what_is_not_a_number_is_not_left_out(backends, query_len, soft_cap):
    case = Case([(query_len, 40)], 16, (2, 1), 16)
    row = case.kv_layer[case.tables[0][1], 0, :, 5]
    for nan in (0x7FC00000, -1):  # the usual one, and what `fill_poison` writes
        row.view(torch.int32).fill_(nan)
        for tier, backend in backends.items():
            assert case.attend(backend, soft_cap=soft_cap).isnan().all(), tier


def test_a_decode_step_and_a_chunk_agree_but_for_rounding(backend):
    case = Case([(2, 400)], 16, (6, 2), 64)
    expected = case.attend(backend)[1:]
    torch.testing.assert_close(chunk(case, 399, 400).attend(backend), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("block_size", [1, 16])
def test_blocks_before_the_window_may_be_gone(backend, block_size, query_len):
    case = Case([(query_len, 700)], block_size, (6, 2), 32, torch.bfloat16)
    expected = case.attend(backend, window=100)
    case.metadata = replace(case.metadata, block_tables=case.metadata.block_tables.clone())
    case.metadata.block_tables[:, : (700 - query_len + 1 - 100) // block_size] = -1
    assert torch.equal(case.attend(backend, window=100), expected)


def test_layouts_that_do_not_fit_are_refused_by_name(best):
    case = Case(LENS["mixed"], 16, (6, 2), 32)
    metadata, q, kv_layer = case.metadata, case.q, case.kv_layer
    params = AttentionParams(1.0)

    def attend(q=q, kv_layer=kv_layer, params=params, **changes):
        return best.attend(q, case.k, case.v, kv_layer, replace(metadata, **changes), params)

    attend()
    long_table = torch.full_like(metadata.block_tables, len(kv_layer))
    refused = {
        "q: dtype": {"q": q.bfloat16()},
        "q: last dimension": {"q": q.transpose(1, 2).contiguous().transpose(1, 2)},
        "q: heads have stride": {"q": q.transpose(0, 1).contiguous().transpose(0, 1)},
        "q: torch.float64": {"q": q.double(), "kv_layer": kv_layer.double()},
        "q: 5 heads": {"q": q[:, :5]},
        "q: D": {"q": q[:, :, :16]},
        "kv_layer: shape": {"kv_layer": kv_layer[0]},
        "block_tables: B": {"seq_lens": metadata.seq_lens[1:]},
        "seq_lens: dtype": {"seq_lens": metadata.seq_lens.long()},
        "seq_lens: wrong for seq 1 ": {"seq_lens": metadata.seq_lens - torch.tensor([0, 1, 0, 0, 0]).int()},
        "seq_lens: last dimension": {"seq_lens": metadata.seq_lens.repeat_interleave(2)[::2]},
        "cu_seqlens_q: wrong": {"cu_seqlens_q": metadata.cu_seqlens_q + 1},
        "block_tables: wrong for seq 0 ": {"block_tables": long_table},
        "block_tables: wrong for seq 3 ": {"block_tables": metadata.block_tables[:, :2].contiguous()},
        "params: scale": {"params": AttentionParams(-1.0)},
    }
    for message, arguments in refused.items():
        with pytest.raises(InternalError, match=message):
            attend(**arguments)


def test_another_batch_of_the_same_shape_is_not_taken_for_the_last_one(best):
    for seed in (1, 2):
        Case(LENS["mixed"], 16, (6, 2), 32, seed=seed).check(best)


def alone(case, i):
    """Seq i of a case as a case of its own, over the same pool."""
    start, end = case.metadata.cu_seqlens_q[i : i + 2].tolist()
    return part(case, start, end, i, case.lens[i][1])


def chunk(case, first, last):
    """Tokens first … last of a case of one fresh prompt (or its last tokens), earlier ones being its context."""
    query_len, seq_len = case.lens[0]
    skipped = seq_len - query_len
    return part(case, first - skipped, last - skipped, 0, last)


def part(case, start, end, i, seq_len):
    taken = object.__new__(Case)
    taken.q, taken.k, taken.v, taken.kv_layer = case.q[start:end], case.k[start:end], case.v[start:end], case.kv_layer
    taken.lens = [(end - start, seq_len)]
    taken.metadata = replace(
        case.metadata,
        cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=case.metadata.block_tables[i : i + 1],
        slot_mapping=case.metadata.slot_mapping[start:end],
        query_lens_host=(end - start,),
        seq_lens_host=(seq_len,),
    )
    return taken
