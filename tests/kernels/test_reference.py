"""The reference back-end against attention written out in float64, one query at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionMetadata
from kernels.reference import ReferenceBackend
from tandem.errors import InternalError
from tests.kernels.devices import needs_gpu
from tests.kernels.operations_oracle import Rotation
from tests.kernels.oracle import LENS, QUANTIZED, TOLERANCES, Case

BACKEND = ReferenceBackend()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_each_kind_of_batch_is_exact_in_each_dtype(lens, dtype):
    Case(lens, 16, dtype=dtype).check(BACKEND)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_each_head_dim_is_exact_in_each_dtype(head_dim, dtype):
    Case(LENS["mixed"], 16, head_dim=head_dim, dtype=dtype).check(BACKEND)


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_quantized_kv_is_read_as_it_is_stored(lens, dtype, kv_dtype):
    Case(lens, 16, dtype=dtype, kv_dtype=kv_dtype).check(BACKEND)
    Case(lens, 3, dtype=dtype, kv_dtype=kv_dtype).check(BACKEND, window=5)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_each_block_size_and_grouping_is_exact(lens, heads, block_size):
    Case(lens, block_size, heads).check(BACKEND)


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_a_query_sees_its_window_and_no_more(lens, window):
    Case(lens, 16).check(BACKEND, window)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 8, 16]),
    window=st.none() | st.integers(1, 20),
)
def test_any_ragged_batch_is_exact(lens, block_size, window):
    Case([(query, query + context) for query, context in lens], block_size).check(BACKEND, window)


def test_a_seq_is_unmoved_by_its_neighbours():
    alone = Case([(1, 20)], 16).attend(BACKEND)
    together = Case([(1, 20), (1, 200)], 16)
    together.q[0], together.kv_layer[together.tables[0]] = Case([(1, 20)], 16).q[0], torch.nan
    lonely = Case([(1, 20)], 16)
    together.kv_layer[together.tables[0]] = lonely.kv_layer[lonely.tables[0]]
    torch.testing.assert_close(together.attend(BACKEND)[:1], alone)


WRONG = {
    "q: dtype": {"q": lambda q: q.double()},
    "q: D is 4, elsewhere 8": {"q": lambda q: q[..., :4]},
    "q: 3 heads do not divide into 2 KV heads": {"q": lambda q: q[:, :3]},
    "q: shape": {"q": lambda q: q[0]},
    "q: last dimension": {"q": lambda q: q.mT.contiguous().mT},
    "q: device": {"q": lambda q: q.to("meta")},
    "kv_layer: KV is 1": {"kv_layer": lambda kv: kv[:, :1]},
}


@pytest.mark.parametrize(("named", "change"), WRONG.items(), ids=WRONG)
def test_a_wrong_argument_of_attend_is_named(named, change):
    case = Case([(1, 5)], 16)
    for name, alter in change.items():
        setattr(case, name, alter(getattr(case, name)))
    with pytest.raises(InternalError, match=named):
        case.attend(BACKEND)


def test_wrong_metadata_is_named():
    case, other = Case([(1, 5)], 16), Case([(1, 5), (1, 6)], 16)
    fields = ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping", "query_lens_host", "seq_lens_host")
    good = {name: getattr(case.metadata, name) for name in fields}
    for name in ("cu_seqlens_q", "block_tables"):
        case.metadata = AttentionMetadata(**(good | {name: getattr(other.metadata, name)}))
        with pytest.raises(InternalError, match=name):
            case.attend(BACKEND)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_a_soft_cap_bends_the_scores(lens, window):
    Case(lens, 16).check(BACKEND, window, soft_cap=0.5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_a_sink_takes_its_share_of_the_softmax(lens, window):
    Case(lens, 16).check(BACKEND, window, sunk=True)


@needs_gpu
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_cuda_device_gives_the_same(lens, window):
    Case(lens, 16).to("cuda").check(BACKEND, window)


def test_a_case_has_the_strides_of_the_pool_on_every_device():
    case = Case(LENS["mixed"], 16)
    here = case.kv_layer.stride()
    assert not case.kv_layer.is_contiguous()
    assert case.to("meta").kv_layer.stride() == here
    rotation = Rotation.make(5, (4, 2), 8, 16, torch.float32)
    assert not rotation.qkv.is_contiguous()
    assert rotation.to("meta").qkv.stride() == rotation.qkv.stride()
    assert rotation.to("meta").kv_layer.stride() == rotation.kv_layer.stride()
