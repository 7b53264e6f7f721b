"""Ranks that each hold a part of a model: tokens of transformers, logits the same to the bit at every size."""

from __future__ import annotations

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, TinyModel
from kernels.group import SoloGroup
from kernels.quantized import QuantForm
from models.config import load_model_config
from models.loading import load_model
from models.shard import SEGMENTS, Shard, segment_borders
from tandem.errors import ConfigError
from tests.paged_driver import CPU, REFERENCE, edited, load_tiny, load_transformers, random_prompt, reference_tokens
from tests.ranks import greedy_tokens, load_part, ranks_of, rows_of_logits

PROMPTS = [random_prompt(33, 1), random_prompt(7, 2), random_prompt(50, 3)]
WIDE = TinyModel("wide", "llama", {"num_attention_heads": 8, "head_dim": 64, "intermediate_size": 43 * 32})
"""Segments of its MLP are not equal; 4 and 8 ranks share a K/V head."""

AT_2_TOO = {"gpt-oss", "llama-single-kv-head", "olmo2", "qwen2-moe"}


@pytest.fixture(scope="module")
def two():
    with ranks_of(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with ranks_of(4) as ranks:
        yield ranks


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_ranks_give_the_float32_tokens_of_transformers_and_the_bits_of_one(tiny, checkpoint, two, four):
    folder = checkpoint(tiny)
    model = load_transformers(folder)
    expected = [reference_tokens(model, prompt, 8) for prompt in PROMPTS]
    alone = rows_of_logits(SoloGroup(), folder, "auto", "bfloat16")
    for ranks in (two, four) if tiny.name in AT_2_TOO else (four,):
        assert ranks.run(greedy_tokens, folder, "reference", PROMPTS, 8) == expected
        assert ranks.run(rows_of_logits, folder, "auto", "bfloat16") == alone


@pytest.mark.native
@pytest.mark.parametrize(("dtype", "form"), [("float32", None), *(("bfloat16", form) for form in (None, *QuantForm))])
def test_2_4_and_8_ranks_give_the_bits_of_one_in_every_form(dtype, form, checkpoint, two, four):
    folder = checkpoint(WIDE)
    with ranks_of(8) as eight:
        alone = rows_of_logits(SoloGroup(), folder, "cpu", dtype, form, 150)
        assert all(ranks.run(rows_of_logits, folder, "cpu", dtype, form, 150) == alone for ranks in (two, four, eight))


def test_a_rank_holds_its_share_and_all_say_that_they_are_one_model(checkpoint):
    folder = checkpoint(WIDE)
    whole, *parts = (load_part(group, folder, "reference", "float32") for group in (None, SoloGroup(), SoloGroup(3, 4)))
    assert parts[0].fingerprint == parts[1].fingerprint != whole.fingerprint
    assert [part.kv_layout(16) for part in parts] == [whole.kv_layout(16)] * 2
    assert [part.rank_layout(16).num_kv_heads for part in (whole, *parts)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("size", "keys", "told"),
    [
        (3, {}, "3 is none of 1, 2, 4, 8"),
        (8, {}, "8 ranks cannot share 4 heads evenly: give 1 or 2 or 4"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}, "4 ranks cannot share 6 K/V heads"),
    ],
)
def test_ranks_that_cannot_share_heads_are_refused_by_name(size, keys, told, checkpoint, tmp_path):
    config = load_model_config(edited(checkpoint(TINY_MODELS[0]), tmp_path, **keys))
    with pytest.raises(ConfigError, match=f"^--tensor-parallel: {told}"):
        Shard(config, SoloGroup(0, size))


def test_groups_of_inputs_that_ranks_would_have_to_cut_are_refused_by_name(checkpoint):
    folder = checkpoint(TINY_MODELS[0])  # INT4: 3 groups in its MLP, 2 in what attention gives
    with pytest.raises(
        ConfigError, match=r"^--tensor-parallel: .*o_proj has 2 groups of inputs to share: give 1 or 2$"
    ):
        load_model(folder, "float32", CPU, REFERENCE, QuantForm.INT4, group=SoloGroup(0, 4))


def test_models_that_transformers_runs_are_refused_by_name(checkpoint):
    with pytest.raises(ConfigError, match=r"^--tensor-parallel: models that transformers runs cannot be split: give 1"):
        load_model(checkpoint(TINY_MODELS[0]), None, CPU, REFERENCE, None, "transformers", group=SoloGroup(0, 2))


@pytest.mark.parametrize("unit", [1, 2, 32, 128])
@pytest.mark.parametrize("units", [1, 2, 3, 7, 8, 43, 86, 100])
def test_segments_are_cut_at_groups_and_as_even_as_these_allow(unit, units):
    borders = segment_borders(units * unit, unit)
    sizes = torch.tensor(borders).diff() // unit
    assert borders[0] == 0
    assert borders[-1] == units * unit
    assert len(sizes) == max(count for count in (1, 2, 4, SEGMENTS) if count <= units)
    assert not any(border % unit for border in borders)
    assert 0 <= sizes.max() - sizes.min() <= 1


def test_a_whole_model_without_a_group_is_summed_as_before(checkpoint):
    model = load_tiny(checkpoint(TINY_MODELS[0]), "float32")
    assert model.shard is None
    assert model.rank_layout(16) == model.kv_layout(16)
