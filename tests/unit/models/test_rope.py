"""Rotary embedding follows transformers in each scaling and each form of config.json."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from bench.support.tiny_models import TinyModel
from models.config import load_model_config
from models.files.checkpoint import read_checkpoint
from models.loading import load_model
from models.rope import RotaryEmbedding
from tandem.errors import CheckpointError
from tests.paged_driver import REFERENCE, PagedDriver, load_tiny, load_transformers, random_prompt, reference_tokens

CPU = torch.device("cpu")
CONTEXT = 128

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn-untruncated": {"rope_type": "yarn", **YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-attention-factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    "yarn-inferred-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
}


@pytest.fixture
def write_config(tmp_path):
    def write(**keys):
        config = {
            "model_type": "llama",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": CONTEXT,
            **keys,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def cos_sin_of_both(folder, positions):
    config = load_model_config(folder)
    ours = RotaryEmbedding(config.rope, config.head_dim, CPU).cos_sin(positions)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))(torch.zeros(1), positions[None])
    return torch.stack(ours), torch.stack(theirs)[:, 0, :, : config.head_dim // 2]


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_new_form_gives_the_angles_of_transformers(write_config, scaling):
    ours, theirs = cos_sin_of_both(
        write_config(rope_parameters={"rope_theta": 50_000.0, **scaling}), torch.arange(CONTEXT)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_old_form_gives_the_angles_of_transformers(write_config, scaling):
    old = {"type": scaling["rope_type"], **{key: value for key, value in scaling.items() if key != "rope_type"}}
    ours, theirs = cos_sin_of_both(write_config(rope_scaling=old, rope_theta=50_000), torch.arange(CONTEXT))
    assert torch.equal(ours, theirs)


def test_rope_scaling_goes_before_rope_parameters(write_config):
    folder = write_config(
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "linear", "factor": 5.0, "rope_theta": 77.0},
    )
    ours, theirs = cos_sin_of_both(folder, torch.arange(CONTEXT))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_context_is_the_one_that_the_router_reads(write_config, scaling):
    folder = write_config(rope_parameters=scaling)
    assert load_model_config(folder).context_tokens == read_checkpoint(str(folder)).context_tokens


def test_a_scaling_stretches_the_context_by_its_factor(write_config):
    expected = {"default": 128, "linear": 384, "dynamic": 256, "llama3": 128, "yarn": 128, "yarn-inferred-factor": 128}
    found = {name: load_model_config(write_config(rope_parameters=SCALINGS[name])).context_tokens for name in expected}
    assert found == expected


def test_absent_rope_keys_mean_the_plain_embedding(write_config):
    ours, theirs = cos_sin_of_both(write_config(), torch.arange(CONTEXT))
    assert torch.equal(ours, theirs)


def test_dynamic_scaling_of_a_decode_step_beyond_the_context_is_that_of_transformers(write_config):
    folder = write_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    for position in (CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        ours, theirs = cos_sin_of_both(folder, torch.tensor([position]))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_dynamic_frequencies_depend_on_the_position_alone(write_config):
    config = load_model_config(write_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    rope = RotaryEmbedding(config.rope, config.head_dim, CPU)
    together = torch.stack(rope.cos_sin(torch.tensor([5, 200, 300])))
    alone = torch.stack(rope.cos_sin(torch.tensor([200])))
    assert torch.equal(together[:, 1:2], alone)


@pytest.mark.parametrize("name", ["dynamic", "llama3", "yarn-mscale", "yarn-attention-factor"])
def test_generation_with_scaling_equals_transformers(checkpoint, name):
    """The angles of every scaling are compared above."""
    rope = {"rope_theta": 10_000.0, **SCALINGS[name]}
    overrides = {"max_position_embeddings": CONTEXT, "rope_parameters": rope}
    folder = checkpoint(TinyModel(f"llama-{name}", "llama", overrides))
    prompts = [random_prompt(length) for length in (1, 31, 33, 100)]
    reference = load_transformers(folder)
    driver = PagedDriver(load_tiny(folder), 16, 64)
    assert driver.generate(prompts, 24, 64) == [reference_tokens(reference, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("keys", [{}, {"attention_factor": 1.3}, {"factor": 9.0}, {"type": "yarn"}], ids=str)
@pytest.mark.parametrize(
    ("context", "served", "is_long"), [(CONTEXT, CONTEXT, True), (CONTEXT, 32, False), (32, 32, False)]
)
def test_factors_of_longrope_are_those_that_transformers_takes_for_a_text_of_all_that_is_served(
    write_config, context, served, is_long, keys
):
    factors = {"long_factor": [2.0 + i for i in range(16)], "short_factor": [1.0 + i / 7 for i in range(16)]}
    folder = write_config(
        model_type="phi3",
        max_position_embeddings=context,
        original_max_position_embeddings=32,
        rope_scaling={"type": "longrope", **factors, **keys},
        pad_token_id=None,
    )
    config, positions = load_model_config(folder, served), torch.arange(served)
    assert config.rope.scaling.is_long == is_long
    ours = RotaryEmbedding(config.rope, config.head_dim, CPU).cos_sin(positions)
    theirs = Phi3RotaryEmbedding(AutoConfig.from_pretrained(folder))(torch.zeros(1), positions[None])
    assert torch.equal(torch.stack(ours), torch.stack(theirs)[:, 0, :, :16])
    assert config.context_tokens == served
    assert read_checkpoint(str(folder)).context_tokens == context


def test_longrope_of_a_short_context_generates_as_transformers_does_and_keeps_apart_from_that_of_a_long_one(checkpoint):
    factors = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    folder = checkpoint(TinyModel("phi3-64", "phi3", {"original_max_position_embeddings": 64, "rope_parameters": rope}))
    served = {tokens: load_model(folder, None, CPU, REFERENCE, context_tokens=tokens) for tokens in (None, 64, 63)}
    prompts = [random_prompt(length) for length in (1, 17, 40)]
    reference = load_transformers(folder)
    expected = [reference_tokens(reference, prompt, 24) for prompt in prompts]
    assert PagedDriver(served[64], 16, 64).generate(prompts, 24, 64) == expected
    assert PagedDriver(served[None], 16, 64).generate(prompts, 24, 64) != expected
    assert served[64].fingerprint == served[63].fingerprint != served[None].fingerprint


def test_dynamic_scaling_generates_as_transformers_does_across_the_end_of_the_context(checkpoint):
    overrides = {"max_position_embeddings": 64, "rope_parameters": {**SCALINGS["dynamic"], "rope_theta": 10_000.0}}
    folder = checkpoint(TinyModel("llama-dynamic-64", "llama", overrides))
    driver = PagedDriver(load_tiny(folder), 16, 64)
    for length in (40, 64):
        prompt = random_prompt(length)
        reference = load_transformers(folder)  # afresh: it keeps the frequencies of longer seqs
        assert driver.generate([prompt], 48, 32) == [reference_tokens(reference, prompt, 48)]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
    ],
)
def test_rope_that_is_not_understood_is_refused_by_key(write_config, keys, named):
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}"):
        load_model_config(write_config(**keys))
