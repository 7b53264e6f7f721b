"""The flash-attn back-end: which seqs go where, what is passed on, and that the parts make the whole."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kernels import flash, triton
from kernels.attention import AttentionMetadata, AttentionParams
from kernels.dispatch import available_backends
from kernels.flash import Flash2, Flash3, Flash4, FlashAttention, Run, Source, plan_runs
from kernels.reference import ReferenceBackend
from tests.kernels.oracle import LENS, Case

FRESH, PAGED = Source.FRESH, Source.PAGED
needs_flash = pytest.mark.skipif(
    not torch.cuda.is_available() or flash.obstacle(torch.device("cuda", 0), torch.bfloat16) is not None,
    reason="needs a CUDA device and the package flash-attn",
)


class FakeFlash:
    """flash-attn's function, with its own rules, computed by the reference; notes how it was called."""

    def __init__(self):
        self.calls = []

    def flash_attn_varlen_func(self, q, k, v, cu_q, cu_k, max_q, max_k, *, block_table=None, **options):
        lens = [cu.diff().tolist() for cu in (cu_q, cu_k)]
        assert (max(lens[0]), max(lens[1])) == (max_q, max_k)
        if block_table is None:
            self.calls.append("ragged")
            block_table, kv_layer = self._as_blocks(k, v, lens[1])
        else:
            self.calls.append("paged")
            kv_layer = self._pool(k, v)
        return self._attend(q, kv_layer, lens, block_table, options)

    def _pool(self, k, v):
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert k.stride(-1) == v.stride(-1) == 1
        return torch.stack((k, v), 1).transpose(2, 3)  # [N, 2, Hkv, S, D]

    def _as_blocks(self, k, v, lens):
        block = max(lens)
        pool = torch.full((len(lens), 2, k.shape[1], block, k.shape[2]), torch.nan, dtype=k.dtype)
        for i, (keys, values) in enumerate(zip(k.split(lens), v.split(lens), strict=True)):
            pool[i, 0, :, : lens[i]], pool[i, 1, :, : lens[i]] = keys.transpose(0, 1), values.transpose(0, 1)
        return torch.arange(len(lens), dtype=torch.int32)[:, None], pool

    def _attend(self, q, kv_layer, lens, block_table, options):
        before, after = options["window_size"]
        assert options["causal"]
        assert after == min(before, 0)
        cu_q = torch.tensor([0, *lens[0]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(lens[1], dtype=torch.int32)
        slots = torch.zeros(len(q), dtype=torch.int64)
        metadata = AttentionMetadata(cu_q, seq_lens, block_table, slots, tuple(lens[0]), tuple(lens[1]))
        window = None if before < 0 else before + 1
        params = AttentionParams(options["softmax_scale"], window, options["softcap"] or None)
        gathered = self._keys(kv_layer, metadata)
        return ReferenceBackend().attend(q, *gathered, kv_layer, metadata, params)

    @staticmethod
    def _keys(kv_layer, metadata):
        """The k and v that the reference wants of fresh prompts: the last `query_len` of each seq."""
        sides = [[], []]
        for table, query_len, seq_len in zip(
            metadata.block_tables, metadata.query_lens_host, metadata.seq_lens_host, strict=True
        ):
            kv = kv_layer[table.clamp(min=0)].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, seq_len - query_len : seq_len]
            for side, rows in zip(sides, kv, strict=True):
                side.append(rows)
        return [torch.cat(side) for side in sides]


class FakeFlash3(FakeFlash):
    """As `FakeFlash`; its call over blocks takes ragged queries, and blocks of any size."""

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, **options
    ):
        self.calls.append("paged")
        query_lens = cu_seqlens_q.diff().tolist()
        assert max(query_lens) == max_seqlen_q
        kv_layer = torch.stack((k_cache, v_cache), 1).transpose(2, 3)
        return self._attend(q, kv_layer, [query_lens, cache_seqlens.tolist()], page_table, options)


class FakeFlash4(FakeFlash):
    """flash-attn 4's function, by its own names: a pair is returned, and a side without a window is None."""

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        cu_seqlens_k=None,
        seqused_k=None,
        page_table=None,
    ):
        query_lens = cu_seqlens_q.diff().tolist()
        lens = [query_lens, (cu_seqlens_k.diff() if seqused_k is None else seqused_k).tolist()]
        assert (max(lens[0]), max(lens[1])) == (max_seqlen_q, max_seqlen_k)
        if page_table is None:
            self.calls.append("ragged")
            page_table, kv_layer = self._as_blocks(k, v, lens[1])
        else:
            assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
            assert page_table.dtype is torch.int32
            assert page_table.stride(-1) == 1
            self.calls.append("paged")
            kv_layer = torch.stack((k, v), 1).transpose(2, 3)
        window = (-1, -1) if window_size == (None, None) else window_size
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window, "softcap": 0.0}
        return self._attend(q, kv_layer, lens, page_table, options), None


class Noting(ReferenceBackend):
    """The back-end for the rest; notes how many seqs it was given."""

    def __init__(self):
        self.batches = []

    def attend(self, q, k, v, kv_layer, metadata, params):
        self.batches.append(len(metadata.query_lens_host))
        return super().attend(q, k, v, kv_layer, metadata, params)


@pytest.mark.parametrize(
    ("lens", "runs"),
    [
        ([(5, 5), (2, 2), (7, 7)], [Run(FRESH, 0, 3)]),
        ([(4, 9), (20, 20), (30, 30), (2, 8)], [Run(PAGED, 0, 1), Run(FRESH, 1, 3), Run(PAGED, 3, 4)]),
        ([(20, 20), (4, 9)], [Run(FRESH, 0, 1), Run(PAGED, 1, 2)]),
        ([(9, 9), (4, 9), (3, 3), (2, 7)], [Run(PAGED, 0, 4)]),
    ],
    ids=["prompts", "mixed", "prompt first", "too short to part"],
)
def test_seqs_go_where_their_keys_are(lens, runs):
    query_lens, seq_lens = zip(*lens, strict=True)
    assert plan_runs(query_lens, seq_lens, min_fresh_tokens=10) == runs


PROMPTS = {
    "fresh prompts": LENS["fresh prompts"],
    "chunks": LENS["chunks"],
    "both": [(12, 12), (7, 40), (2, 32), (5, 5), (3, 3), (16, 17)],
}


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_parts_make_the_whole(monkeypatch, kind, block_size, window, soft_cap):
    monkeypatch.setattr(flash, "MIN_FRESH_TOKENS", 1)
    library, other = FakeFlash(), Noting()
    Case(PROMPTS[kind], block_size).check(FlashAttention(Flash2(library), other), window, soft_cap)
    assert bool(other.batches) == (kind != "fresh prompts" and block_size == 16)
    Case(PROMPTS[kind], block_size).check(FlashAttention(Flash3(FakeFlash3()), None), window, soft_cap)
    library, other = FakeFlash4(), Noting()
    Case(PROMPTS[kind], block_size).check(FlashAttention(Flash4(library), other), window, soft_cap)
    assert bool(other.batches) == (soft_cap is not None or (kind != "fresh prompts" and block_size == 256))


@pytest.mark.parametrize(
    ("kind", "block_size", "calls", "batches"),
    [
        ("fresh prompts", 16, ["ragged"], []),
        ("chunks", 256, ["paged"], []),
        ("both", 16, ["ragged", "ragged"], [2, 1]),
        ("both", 256, ["ragged", "paged", "ragged", "paged"], []),
    ],
)
def test_each_run_is_one_call(monkeypatch, kind, block_size, calls, batches):
    monkeypatch.setattr(flash, "MIN_FRESH_TOKENS", 1)
    library, other = FakeFlash(), Noting()
    Case(PROMPTS[kind], block_size).attend(FlashAttention(Flash2(library), other))
    assert (library.calls, other.batches) == (calls, batches)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_step_with_streams_goes_elsewhere_as_a_whole(kind):
    library, other = FakeFlash3(), Noting()
    Case(LENS[kind], 256).check(FlashAttention(Flash3(library), other))
    assert (library.calls, other.batches) == ([], [len(LENS[kind])])


def test_a_captured_step_goes_elsewhere_whatever_its_lengths_are():
    library, other, case = FakeFlash3(), Noting(), Case(LENS["fresh prompts"], 256)
    case.metadata = replace(case.metadata, is_padded=True)
    case.check(FlashAttention(Flash3(library), other))
    assert (library.calls, other.batches) == ([], [len(LENS["fresh prompts"])])


def test_heads_that_flash_attn_would_pad_or_refuse_go_elsewhere():
    for head_dim in (12, 264):
        library, other = FakeFlash(), Noting()
        Case(LENS["fresh prompts"], 16, head_dim=head_dim).check(FlashAttention(Flash2(library), other))
        assert (library.calls, other.batches) == ([], [3])


def test_version_4_computes_heads_of_up_to_128_elements_and_of_256():
    for head_dim, is_its in ((128, True), (136, False), (256, True)):
        library, other = FakeFlash4(), Noting()
        Case(LENS["fresh prompts"], 16, head_dim=head_dim).check(FlashAttention(Flash4(library), other))
        assert (bool(library.calls), bool(other.batches)) == (is_its, not is_its)


def packages(monkeypatch, capability=(9, 0), **installed):
    """What can be imported: a module of each name whose calls take these arguments; None = it is broken."""
    monkeypatch.setattr(triton, "obstacle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        module = ModuleType(name)
        if installed.get(name.replace(".", "_")) is None:
            module = None
        else:
            call = taking(*installed[name.replace(".", "_")].split())
            module.flash_attn_varlen_func = module.flash_attn_with_kvcache = call
        monkeypatch.setitem(sys.modules, name, module)


def taking(*names):
    """A function with these arguments."""

    def function(**_):
        raise AssertionError

    kind = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return function


V2 = "block_table softcap window_size"
V3 = "cache_seqlens page_table cu_seqlens_q softcap window_size return_attn_probs"
V4 = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_k page_table softmax_scale causal window_size"


@pytest.mark.parametrize(
    ("dtype", "capability", "installed", "reason"),
    [
        (torch.float32, (8, 0), {"flash_attn": V2}, "float32"),
        (torch.bfloat16, (8, 0), {}, "flash_attn cannot be used"),
        (torch.bfloat16, (8, 0), {"flash_attn": "block_table window_size"}, "takes no softcap"),
        (
            torch.bfloat16,
            (9, 0),
            {"flash_attn_interface": V3.removesuffix(" return_attn_probs")},
            "takes no return_attn",
        ),
        (torch.bfloat16, (9, 0), {"flash_attn": V2}, "flash_attn_interface cannot be used"),  # slower than Triton there
        (torch.bfloat16, (9, 0), {"flash_attn_cute": V4.replace("seqused_k ", "")}, "flash_attn.cute is too old or"),
        (torch.bfloat16, (12, 0), {"flash_attn_cute": V4}, "flash_attn cannot be used"),  # it has no pages there
    ],
)
def test_it_says_what_stands_in_the_way(monkeypatch, dtype, capability, installed, reason):
    packages(monkeypatch, capability, **installed)
    assert reason in (flash.obstacle(torch.device("cuda", 0), dtype) or "")


@pytest.mark.parametrize(
    ("capability", "lacking", "taken"),
    [
        ((9, 0), "", "flash-attn 3"),
        ((9, 0), "flash_attn_interface", "flash-attn 4"),
        ((10, 0), "", "flash-attn 4"),
        ((10, 3), "flash_attn_cute", "flash-attn 2"),
        ((8, 0), "", "flash-attn 2"),
        ((12, 0), "", "flash-attn 2"),
    ],
)
def test_each_gpu_has_the_version_that_is_made_for_it_and_says_which(monkeypatch, capability, lacking, taken):
    installed = {"flash_attn": V2, "flash_attn_interface": V3, "flash_attn_cute": V4}
    packages(monkeypatch, capability, **{name: each for name, each in installed.items() if name != lacking})
    device = torch.device("cuda", 0)
    assert flash.obstacle(device, torch.bfloat16) is None
    assert flash.describe(device) == f"{taken} for prompts, Triton for the rest"


def test_version_4_serves_only_where_it_is_asked_for(monkeypatch):
    device = torch.device("cuda", 0)
    packages(monkeypatch, (9, 0), flash_attn_interface=V3, flash_attn_cute=V4)
    assert flash.doubt(device) is None
    packages(monkeypatch, (9, 0), flash_attn_cute=V4)
    assert "--attention-backend flash_attn" in (flash.doubt(device) or "")


def test_it_needs_what_triton_needs():
    assert "CUDA device" in (flash.obstacle(torch.device("cpu"), torch.bfloat16) or "")


def test_it_is_the_first_choice():
    assert available_backends(torch.device("cpu"))[0].name == "flash_attn"


@pytest.mark.gpu
@needs_flash
@pytest.mark.parametrize(("head_dim", "soft_cap"), [(64, None), (80, None), (128, None), (128, 20.0), (256, None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", [*PROMPTS])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_gpu_agrees_with_the_oracle(monkeypatch, kind, block_size, window, dtype, head_dim, soft_cap):
    monkeypatch.setattr(flash, "MIN_FRESH_TOKENS", 1)
    backend = flash.load().attention
    Case(PROMPTS[kind], block_size, (8, 2), head_dim, dtype).to("cuda").check(backend, window, soft_cap)
