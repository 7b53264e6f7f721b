"""The reference back-end against attention written out in float64, one query at a time."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionMetadata
from kernels.reference import ReferenceBackend
from tandem.errors import InternalError

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Case:
    """A batch over a shuffled pool; slots that hold no token are NaN, `-1` pads the tables."""

    def __init__(self, lens, block_size, heads=(4, 2), head_dim=8, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        self.lens = lens
        query_lens, seq_lens = zip(*lens, strict=True)
        counts = [-(-seq_len // block_size) for seq_len in seq_lens]
        ids = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        width = max(counts) + 1
        self.keys, self.values = (
            [torch.randn(n, num_kv_heads, head_dim, generator=generator, dtype=torch.float64) for n in seq_lens]
            for _ in range(2)
        )
        pool = torch.full((sum(counts) + 3, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
        self.kv_layer = pool[:, 1]  # a strided view, as a layer of the pool is
        slots = [[table[p // block_size] * block_size + p % block_size for p in range(n)] for table, n in self._each()]
        self.k, self.v = (
            torch.cat([t[-q:] for t, q in zip(side, query_lens, strict=True)]).to(dtype)
            for side in (self.keys, self.values)
        )
        self.q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        self.metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor([t + [-1] * (width - len(t)) for t in self.tables], dtype=torch.int32),
            slot_mapping=torch.tensor([slot for row, q in zip(slots, query_lens, strict=True) for slot in row[-q:]]),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )
        for side, tensors in enumerate((self.keys, self.values)):
            for (table, seq_len), tensor in zip(self._each(), tensors, strict=True):
                for p in range(seq_len):
                    self.kv_layer[table[p // block_size], side, :, p % block_size] = tensor[p].to(dtype)

    def _each(self):
        return zip(self.tables, (seq_len for _, seq_len in self.lens), strict=True)

    def attend(self, window=None):
        scale = self.q.shape[-1] ** -0.5
        return ReferenceBackend().attend(self.q, self.k, self.v, self.kv_layer, self.metadata, scale, window)

    def oracle(self, window=None):
        """Softmax of each query over the keys that it sees, in float64."""
        group = self.q.shape[1] // self.keys[0].shape[1]
        rows = iter(self.q.double())
        out = []
        for (query_len, seq_len), keys, values in zip(self.lens, self.keys, self.values, strict=True):
            rounded = [side.to(self.q.dtype).double().repeat_interleave(group, 1) for side in (keys, values)]
            for position in range(seq_len - query_len, seq_len):
                seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
                scores = torch.einsum("hd,khd->hk", next(rows), rounded[0][seen]) / math.sqrt(self.q.shape[-1])
                out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), rounded[1][seen]))
        return torch.stack(out)

    def check(self, window=None):
        out = self.attend(window)
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        tolerance = TOLERANCES[self.q.dtype]
        torch.testing.assert_close(out.double(), self.oracle(window), atol=tolerance, rtol=tolerance)


LENS = {
    "decode": [(1, 1), (1, 7), (1, 16), (1, 17), (1, 33)],
    "fresh prompts": [(5, 5), (16, 16), (33, 33)],
    "chunks": [(4, 20), (16, 32), (3, 50)],
    "mixed": [(1, 9), (12, 12), (1, 32), (7, 40), (1, 1)],
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_each_kind_of_batch_is_exact_in_each_dtype(lens, dtype):
    Case(lens, 16, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_each_block_size_and_grouping_is_exact(lens, heads, block_size):
    Case(lens, block_size, heads).check()


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_a_query_sees_its_window_and_no_more(lens, window):
    Case(lens, 16).check(window)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 8, 16]),
    window=st.none() | st.integers(1, 20),
)
def test_any_ragged_batch_is_exact(lens, block_size, window):
    Case([(query, query + context) for query, context in lens], block_size).check(window)


def test_a_seq_is_unmoved_by_its_neighbours():
    alone = Case([(1, 20)], 16).attend()
    together = Case([(1, 20), (1, 200)], 16)
    together.q[0], together.kv_layer[together.tables[0]] = Case([(1, 20)], 16).q[0], torch.nan
    lonely = Case([(1, 20)], 16)
    together.kv_layer[together.tables[0]] = lonely.kv_layer[lonely.tables[0]]
    torch.testing.assert_close(together.attend()[:1], alone)


@pytest.mark.parametrize("block_size", [1, 16])
def test_kv_is_stored_at_its_slots_and_nowhere_else(block_size):
    pool = torch.zeros(8, 3, 2, 2, block_size, 4)
    layer = pool[:, 1]
    slots = torch.tensor([3, 0, 8 * block_size - 1])
    k, v = torch.randn(2, 3, 2, 4)
    ReferenceBackend().store_kv(k, v, layer, slots)
    flat = pool.permute(1, 2, 0, 4, 3, 5).reshape(3, 2, 8 * block_size, 2, 4)
    assert torch.equal(flat[1, 0, slots], k)
    assert torch.equal(flat[1, 1, slots], v)
    assert pool.count_nonzero() == k.numel() + v.numel()


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
        case.attend()


def test_wrong_metadata_is_named():
    case, other = Case([(1, 5)], 16), Case([(1, 5), (1, 6)], 16)
    fields = ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping", "query_lens_host", "seq_lens_host")
    good = {name: getattr(case.metadata, name) for name in fields}
    for name in ("cu_seqlens_q", "block_tables"):
        case.metadata = AttentionMetadata(**(good | {name: getattr(other.metadata, name)}))
        with pytest.raises(InternalError, match=name):
            case.attend()


def test_a_wrong_argument_of_store_kv_is_named():
    case = Case([(3, 5)], 16)
    k, slots = torch.zeros(3, 2, 8), case.metadata.slot_mapping
    backend = ReferenceBackend()
    with pytest.raises(InternalError, match="k: dtype"):
        backend.store_kv(k.double(), k, case.kv_layer, slots)
    with pytest.raises(InternalError, match="v: T is 2, elsewhere 3"):
        backend.store_kv(k, k[:2], case.kv_layer, slots)
    with pytest.raises(InternalError, match="slot_mapping: dtype"):
        backend.store_kv(k, k, case.kv_layer, slots.int())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_cuda_device_gives_the_same(lens, window):
    case = Case(lens, 16)
    expected = case.oracle(window)
    names = ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping")
    moved = {name: getattr(case.metadata, name).cuda() for name in names}
    case.metadata = AttentionMetadata(
        **moved, query_lens_host=case.metadata.query_lens_host, seq_lens_host=case.metadata.seq_lens_host
    )
    case.q, case.k, case.v, case.kv_layer = case.q.cuda(), case.k.cuda(), case.v.cuda(), case.kv_layer.cuda()
    torch.testing.assert_close(case.attend(window).double().cpu(), expected, atol=1e-5, rtol=1e-5)
