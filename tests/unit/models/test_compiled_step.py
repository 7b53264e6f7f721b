"""A step as one native call: bit for bit what the operations compute one by one, at every tier, and as exact."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS
from engine.kv_cache import KvCache
from kernels import cpu
from kernels.compiled_step import StepInputs
from kernels.quantized import QuantForm
from models.loading import load_model
from tandem.errors import InternalError
from tandem.kv_layout import QuantDType
from tests.kernels.oracle import named
from tests.kernels.tiers import TIERS
from tests.paged_driver import PagedDriver, PagedSeq, load_tiny, random_prompt

pytestmark = pytest.mark.native

CPU = torch.device("cpu")


@pytest.fixture(params=TINY_MODELS, ids=lambda tiny: tiny.name)
def tiny_folder(request, checkpoint):
    return checkpoint(request.param)


BESIDE = [tiny for tiny in TINY_MODELS if tiny.name in {"llama", "gemma3", "gpt-oss", "olmo3", "qwen2-moe"}]
"""Of each kind of layer one."""
THREADED = [*BESIDE, *(tiny for tiny in TINY_MODELS if tiny.name == "granite")]
"""That have all that phases do between them: granite scales what is added to the residual stream."""


STARVED = 24
"""More threads than any machine of ours has cores: some lose their processor within a phase."""


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _load(folder, dtype, tier=None, form=None):
    """The model as one call, and as one operation after the other."""
    model = load_model(folder, dtype, CPU, cpu.load(tier), form)
    assert model.decoder.compiled is not None
    return model, replace(model, decoder=replace(model.decoder, compiled=None))


def _steps(model, block_size, pool=None):
    """Logits of chunks, decode steps and both in one batch; over `pool`, if it is not to be the driver's own."""
    driver = PagedDriver(model, block_size, 16 + 400 // block_size)
    if pool is not None:
        driver._kv_cache = pool
    first, second, third = (PagedSeq(random_prompt(length)) for length in (70, 9, 150))
    yield driver.step([(first, 48)])
    yield driver.step([(first, 21), (second, 8)])
    yield driver.step([(first, 1), (second, 1), (third, 149)])
    yield driver.step([(third, 1)])


def test_logits_are_those_of_the_operations_one_by_one(tiny_folder, dtype):
    compiled, one_by_one = _load(tiny_folder, dtype)
    for block_size in (1, 16, 64):
        pairs = zip(_steps(compiled, block_size), _steps(one_by_one, block_size), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs), block_size


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_each_tier_is_as_close_to_the_reference_as_its_dtype(checkpoint, tiny):
    """Lower ones with one model of each kind of layer: what the others ask of a kernel, its own tests do."""
    folder = checkpoint(tiny)
    reference = list(_steps(load_tiny(folder, "float32"), 16))
    for tier in TIERS if tiny in BESIDE else TIERS[-1:]:
        for got, expected in zip(_steps(_load(folder, "float32", tier)[0], 16), reference, strict=True):
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4, msg=named(tier))


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("tiny", THREADED, ids=lambda tiny: tiny.name)
def test_the_number_of_threads_changes_no_bit(checkpoint, tiny, dtype):
    model, _ = _load(checkpoint(tiny), dtype)
    torch.set_num_threads(1)
    alone = list(_steps(model, 16))
    for threads in (2, 3, STARVED):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, alone, _steps(model, 16))), threads


def _one_step(model):
    """Arguments of a step of three tokens, over a pool that holds twenty."""
    driver, seq = PagedDriver(model, 16, 4), PagedSeq(random_prompt(23))
    driver.step([(seq, 20)])
    metadata = driver._metadata([(seq, 3)], [range(20, 23)])
    return torch.tensor(seq.token_ids[20:]), torch.arange(20, 23), driver._kv_cache, metadata


def test_only_the_rows_asked_for_come_back(tiny_folder, dtype):
    model, one_by_one = _load(tiny_folder, dtype)
    for method in ("forward", "hidden"):
        inputs = _one_step(model)
        whole = getattr(model.decoder, method)(StepInputs(*inputs, torch.arange(3)))
        stored = inputs[2].clone()
        for rows in ([], [1], [0, 2], [0, 1, 2]):
            asked = getattr(model.decoder, method)(StepInputs(*inputs, torch.tensor(rows, dtype=torch.int64)))
            assert torch.equal(asked, whole[rows]), rows
            assert torch.equal(inputs[2].nan_to_num(), stored.nan_to_num())
        assert torch.equal(getattr(one_by_one.decoder, method)(StepInputs(*inputs, torch.arange(3))), whole)


def test_a_pool_of_another_dtype_is_left_to_the_operations(tiny_folder):
    model, _ = _load(tiny_folder, "bfloat16")
    pool = torch.empty(1, *model.kv_layout(16).block_shape)
    assert model.decoder.compiled.serves(pool.to(torch.bfloat16))
    assert not model.decoder.compiled.serves(pool)


@pytest.mark.parametrize(
    ("what", "index", "value"), [("token_ids", 0, 320), ("token_ids", 0, -1), ("rows", 4, 3), ("rows", 4, -1)]
)
def test_what_is_out_of_range_is_refused_by_name(checkpoint, what, index, value):
    model, _ = _load(checkpoint(TINY_MODELS[0]), "float32")
    inputs = [*_one_step(model), torch.arange(3)]
    inputs[index][1] = value
    with pytest.raises(InternalError, match=what):
        model.decoder.forward(StepInputs(*inputs))


def test_slots_tables_and_lengths_out_of_range_are_refused_by_name(checkpoint):
    model, _ = _load(checkpoint(TINY_MODELS[0]), "float32")
    for name, where, value in [("slot_mapping", 0, 64), ("block_tables", (0, 1), 4), ("seq_lens", 0, 2)]:
        inputs = [*_one_step(model), torch.arange(3)]
        getattr(inputs[3], name)[where] = value
        with pytest.raises(InternalError, match=name):
            model.decoder.forward(StepInputs(*inputs))


@pytest.mark.parametrize("tiny", BESIDE, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("kv_dtype", list(QuantDType))
def test_a_quantised_pool_gives_the_bits_of_the_operations_one_by_one(checkpoint, tiny, dtype, kv_dtype):
    pools, logits = [], []
    for model in _load(checkpoint(tiny), dtype):
        with closing(KvCache.create(model.kv_layout(16, kv_dtype), 41, CPU)) as kv_cache:
            kv_cache.blocks_view.zero_()
            logits.append(list(_steps(model, 16, kv_cache.tensor)))
            pools.append(kv_cache.blocks_view.clone())
    assert all(map(torch.equal, *logits))
    assert torch.equal(*pools)


@pytest.mark.parametrize("tiny", BESIDE, ids=lambda tiny: tiny.name)
def test_quantised_weights_give_the_bits_of_the_operations_one_by_one(checkpoint, tiny, dtype):
    pair = _load(checkpoint(tiny), dtype, form=QuantForm.INT8)
    assert all(map(torch.equal, *(_steps(model, 16) for model in pair)))
