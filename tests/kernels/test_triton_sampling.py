"""Tokens drawn by the Triton kernels against the engine's sampler and against float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields

import pytest
import torch

from engine.draws import SampleSpec
from engine.philox import uniforms
from engine.step import BrokenLogits
from kernels.sampling import DrawParams
from tandem.errors import InternalError
from tandem.types import SamplingParams
from tests.drawing import drawing_kernels, sample
from tests.kernels.devices import needs_gpu, on_each_device

pytest.importorskip("triton")

import triton
import triton.language as tl

from kernels.triton import sampling
from kernels.triton.row_mass import CHUNK, MAX_VOCAB_SIZE
from kernels.triton.sampling import TritonSampler, uniform_share

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's on infinities, in the interpreter

WIDE = CHUNK + 452
"""A vocabulary of two chunks, the second of them short."""
ROUNDING = 1e-6
"""How far a border between tokens may be off, as a share of a row's mass."""


def spec(output=0, **params):
    return SampleSpec(SamplingParams(max_tokens=1, **params), output)


def draw_params(specs, device):
    def column(name, dtype):
        return torch.tensor([getattr(each.params, name) for each in specs], dtype=dtype, device=device)

    return DrawParams(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float64),
        min_p=column("min_p", torch.float32),
        seed=column("seed", torch.int64),
        output_index=torch.tensor([each.output_index for each in specs], dtype=torch.int64, device=device),
    )


def tokens(logits, specs, device):
    return TritonSampler().draw(logits.to(device), draw_params(specs, device)).tolist()


def engine_tokens(logits, specs):
    return [drawn[0].token_id for drawn in sample(logits, specs)]


def normal(rows, vocab_size, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def specs_of_every_kind(count, temperatures=(0.3, 1.0, 2.0)):
    kinds = itertools.product(temperatures, (0, 1, 40, WIDE - 1, 2 * WIDE), (1.0, 0.9, 0.2, 0.0), (0.0, 0.05))
    chosen = random.Random(0).sample(list(kinds), count)
    return [
        spec(7 + (i << 33), temperature=t, top_k=k, top_p=p, min_p=m, seed=(-1) ** i * (i << 55) + i)
        for i, (t, k, p, m) in enumerate(chosen)
    ]


def weights_kept(scores, params, rounding):
    """Float64 weights after top-k, top-p and min-p; `rounding` widens (or, if negative, narrows) each border."""
    weights = scores.exp()
    if 0 < params.top_k < len(scores):
        weights = weights.where(scores >= scores.topk(params.top_k).values[-1], 0.0)
    if params.top_p < 1.0:
        ordered = weights.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        num_kept = max(1, int((before < (params.top_p + rounding) * weights.sum()).sum()))
        weights = weights.where(weights >= ordered[num_kept - 1], 0.0)
    if params.min_p > 0.0:
        weights = weights.where(weights >= params.min_p * (1 - rounding), 0.0)
    return weights


def may_be_drawn(token_id, logits, each):
    """Whether float64 draws this token, give or take `ROUNDING` at the borders."""
    scores = (logits.double() - logits.max()) / max(each.params.temperature, 1e-30)
    uniform = uniforms([each.params.seed], [each.output_index])[0]
    for rounding in (0, ROUNDING, -ROUNDING):
        weights = weights_kept(scores, each.params, rounding)
        reached = weights.cumsum(0) / weights.sum()
        low = reached[token_id] - weights[token_id] / weights.sum()
        if weights[token_id] > 0 and low - ROUNDING <= uniform <= reached[token_id] + ROUNDING:
            return True
    return False


@on_each_device
def test_every_combination_of_filters_draws_what_the_engine_and_float64_draw(device):
    specs = [*specs_of_every_kind(24), spec(temperature=0.0), spec(temperature=0.0, top_k=3, top_p=0.5)]
    logits = normal(len(specs), WIDE)
    got = tokens(logits, specs, device)
    assert all(map(may_be_drawn, got, logits, specs))
    if device == "cpu":  # a GPU's exp differs in the last bits
        assert got == engine_tokens(logits, specs)


@needs_gpu
@pytest.mark.parametrize("vocab_size", [151_936, 262_144])
def test_wide_rows_draw_what_float64_draws(vocab_size):
    specs = specs_of_every_kind(100)
    logits = normal(len(specs), vocab_size)
    assert all(map(may_be_drawn, tokens(logits, specs, "cuda"), logits, specs))


@on_each_device
def test_many_draws_from_one_row_are_the_engines(device):
    specs = [spec(temperature=1.5, seed=11, output=i) for i in range(80)]
    logits = normal(1, 50).expand(80, 50).contiguous()
    got = tokens(logits, specs, device)
    assert all(map(may_be_drawn, got, logits, specs))
    assert got == engine_tokens(logits, specs)


@on_each_device
def test_equal_scores_stay_or_go_together(device):
    logits = torch.tensor([3.0, 1.0, 3.0, 2.0, 2.0, 2.0, 1.0, 0.0]).repeat(24, 1)
    specs = [spec(temperature=2.0, top_k=4, seed=i) for i in range(12)]
    specs += [spec(temperature=2.0, top_p=0.7, seed=i) for i in range(12, 24)]
    got = tokens(logits, specs, device)
    assert got == engine_tokens(logits, specs)
    assert set(got) == {0, 2, 3, 4, 5}


@on_each_device
@pytest.mark.parametrize(("params", "num_kept"), [({"top_p": 0.74999}, 2), ({"top_p": 0.75001}, 3), ({"top_k": 3}, 3)])
def test_a_filter_ends_just_where_it_says(params, num_kept, device):
    logits = -torch.arange(24.0).roll(7) * torch.tensor(2.0).log()  # weights 1/2, 1/4, 1/8 … from token 7 on
    specs = [spec(temperature=1.0, seed=i, **params) for i in range(16)]
    got = tokens(logits.repeat(len(specs), 1), specs, device)
    assert set(got) == set(range(7, 7 + num_kept))


@on_each_device
@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-20}], ids=str)
def test_the_strictest_filters_leave_the_best_token(params, device):
    logits = normal(3, 300, seed=1)
    specs = [spec(**{"temperature": 1.0, "seed": i, **params}) for i in range(3)]
    assert tokens(logits, specs, device) == logits.argmax(-1).tolist()


@on_each_device
def test_a_rows_token_does_not_depend_on_its_batch(device):
    specs = specs_of_every_kind(6)
    logits = normal(6, WIDE, seed=2)
    together = tokens(logits, specs, device)
    order = [4, 0, 5]
    assert tokens(logits[order], [specs[i] for i in order], device) == [together[i] for i in order]


STRANGE = {
    "one token": torch.tensor([2.5]),
    "all alike": torch.zeros(70),
    "banned": torch.tensor([-torch.inf, 1.0, -torch.inf, 0.5, -torch.inf]),
    "far apart": torch.tensor([-1e30, 0.0, -3e38, -0.5, -1e30, -200.0]),
    "halving": -(0.5 ** torch.arange(40.0)).flip(0),
    "huge": torch.tensor([3e38, -3e38, 3e38, 0.0]),
    "close": 1.0 + torch.arange(60.0) * 2**-23,
}


@on_each_device
@pytest.mark.parametrize("row", STRANGE.values(), ids=STRANGE)
def test_strange_rows_draw_what_the_engine_draws(row, device):
    kinds = [
        {},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 4, "top_p": 0.9},
        {"temperature": 1e10, "top_p": 0.5},
        {"top_p": 1 - 1e-9},
    ]
    specs = [spec(**{"temperature": 1.0, "seed": i, **kind}) for i, kind in enumerate(kinds)]
    logits = row.repeat(len(specs), 1)
    assert tokens(logits, specs, device) == engine_tokens(logits, specs)


@on_each_device
def test_broken_rows_are_reported_and_leave_the_others_alone(device):
    logits = normal(6, WIDE, seed=3)
    logits[0, 5] = logits[3, WIDE - 1] = torch.nan
    logits[1] = -torch.inf
    logits[2, WIDE - 1] = torch.inf
    specs = [spec(temperature=i % 2, top_p=0.9) for i in range(6)]
    good = engine_tokens(logits[4:], specs[4:])
    assert tokens(logits, specs, device) == [-1, -1, -1, -1, *good]
    assert TritonSampler().best_tokens(logits.to(device)).tolist() == [-1, -1, -1, -1, *logits[4:].argmax(-1).tolist()]


@on_each_device
def test_the_best_token_is_the_first_among_equals(device):
    logits = normal(3, WIDE, seed=4)
    logits[0, [WIDE - 1, CHUNK, 9]] = 50.0
    logits[1, [WIDE - 1, CHUNK]] = 50.0
    want = [9, CHUNK, logits[2].argmax().item()]
    assert TritonSampler().best_tokens(logits.to(device)).tolist() == want
    assert tokens(logits, [spec(temperature=0.0)] * 3, device) == want


@on_each_device
def test_rows_may_be_strided_and_may_be_none(device):
    wide = torch.full((4, 90), torch.nan, device=device)
    wide[:, 3:80] = normal(4, 77)
    specs = [spec(temperature=1.0, top_k=20, seed=i) for i in range(4)]
    assert tokens(wide[:, 3:80], specs, device) == engine_tokens(normal(4, 77), specs)
    assert TritonSampler().draw(wide[:0], draw_params([], device)).shape == (0,)
    assert TritonSampler().best_tokens(wide[:0]).shape == (0,)


@on_each_device
def test_the_engine_samples_the_same_through_the_kernels(device):
    specs = [*specs_of_every_kind(3), spec(temperature=0.0), spec(temperature=1.0, seed=2**64 - 5, top_k=2**40)]
    specs += [spec(temperature=1.0, logit_bias={7: 30.0}), spec(temperature=1.0, logprobs=3, seed=3)]
    logits = normal(len(specs), 300, seed=7)
    got, want = sample(logits.to(device), specs, drawing_kernels(TritonSampler())), sample(logits, specs)
    assert [drawn[0].token_id for drawn in got] == [drawn[0].token_id for drawn in want]
    assert got[-1][0].logprobs.logprob == pytest.approx(want[-1][0].logprobs.logprob)
    greedy = [spec(temperature=0.0)] * len(specs)
    assert sample(logits.to(device), greedy, drawing_kernels(TritonSampler())) == sample(logits, greedy)


@on_each_device
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_refuses_broken_rows_that_the_kernels_report(temperature, device):
    logits = torch.zeros(3, 50, device=device)
    logits[1, 3] = torch.nan
    drawn = sample(logits, [spec(temperature=temperature, logprobs=1)] * 3, drawing_kernels(TritonSampler()))
    assert drawn[1] == BrokenLogits()
    assert [drawn[0], drawn[2]] == sample(logits[::2], [spec(temperature=temperature, logprobs=1)] * 2)


@triton.jit
def _share_kernel(seed, output_index, shares, total):
    row = tl.program_id(0)
    share = uniform_share(tl.zeros((), tl.int64) + total, tl.load(seed + row), tl.load(output_index + row))
    tl.store(shares + row, share)


@on_each_device
def test_uniform_numbers_are_the_engines_to_the_last_of_53_bits(device):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    outputs = [0, 1, 2**32 - 1, 2**32, 2**40 + 3, 77]
    rows = (torch.tensor(values, device=device) for values in (seeds, outputs))
    shares = torch.zeros(6, dtype=torch.int64, device=device)
    _share_kernel[(6,)](*rows, shares, 1 << 53)
    assert shares.tolist() == [int(u * 2**53) for u in uniforms(seeds, outputs)]


def test_wrong_arguments_are_refused_by_name():
    logits, params = torch.zeros(2, 5), draw_params([spec(), spec()], "cpu")
    columns = {field.name: getattr(params, field.name) for field in fields(params)}
    refusals = {
        "logits: dtype": (logits.double(), columns),
        "logits: V is 0": (logits[:, :0], columns),
        f"logits: V is {MAX_VOCAB_SIZE + 1}": (torch.zeros(1, 1).expand(2, MAX_VOCAB_SIZE + 1).contiguous(), columns),
        "logits: last dimension": (torch.zeros(5, 2).T, columns),
        "top_p: dtype is torch.float32": (logits, columns | {"top_p": columns["top_p"].float()}),
        "seed: R is 1": (logits, columns | {"seed": columns["seed"][:1]}),
    }
    for message, (rows, changed) in refusals.items():
        with pytest.raises(InternalError, match=f"^{message}"):
            TritonSampler().draw(rows, DrawParams(**changed))


@needs_gpu
def test_a_graph_captures_a_draw():
    specs = specs_of_every_kind(8)
    params, logits = draw_params(specs, "cuda"), normal(8, WIDE, seed=5).cuda()
    TritonSampler().draw(logits, params)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = TritonSampler().draw(logits, params)
    logits.copy_(normal(8, WIDE, seed=6))
    graph.replay()
    assert torch.equal(got, TritonSampler().draw(logits, params))


@on_each_device
@pytest.mark.parametrize("filters", [{"top_p": 0.95}, {"top_p": 0.4}, {"top_k": 8000}, {"top_k": 8000, "top_p": 0.9}])
def test_of_a_flat_row_few_costs_are_gathered(filters, device, monkeypatch):
    taken = []
    allocate = sampling._Scratch.allocate
    monkeypatch.setattr(sampling._Scratch, "allocate", lambda *sizes: taken.append(allocate(*sizes)) or taken[-1])
    logits = normal(1, 20_000) / 3
    each = spec(temperature=1.0, seed=5, **filters)
    (token,) = tokens(logits, [each], device)
    assert may_be_drawn(token, logits[0], each)
    (scratch,) = taken
    assert 0 < int(scratch.shortlist_lens[0]) < 20_000 / 8
