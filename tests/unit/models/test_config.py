"""config.json becomes a ModelConfig as transformers would read it, or is refused by key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from kernels.gates import ClampedSwiglu
from models.config import load_model_config
from models.rope_config import LinearScaling, RopeConfig
from tandem.errors import CheckpointError
from tandem.kv_layout import DType

YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
LONG = {"type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]}
GPT_OSS = {**YARN, "num_local_experts": 4, "num_experts_per_tok": 2}


def base(family="llama", **keys):
    config = {
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        **keys,
    }
    return {key: value for key, value in config.items() if value != "absent"}


@pytest.fixture
def write(tmp_path):
    def write_config(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_config


def test_models_and_its_config_need_no_torch():
    code = "import models, models.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "bfloat16"}, DType.BFLOAT16),
        ({"torch_dtype": "float16"}, DType.FLOAT16),
        ({"torch_dtype": "torch.float32"}, DType.FLOAT32),
        ({"dtype": None}, None),
        ({}, None),
    ],
)
def test_dtype_is_read_in_the_old_form_and_the_new(write, keys, dtype):
    assert load_model_config(write(base(**keys))).dtype is dtype


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"head_dim": 40},
        {"num_key_value_heads": "absent", "num_attention_heads": 32, "hidden_size": 128},
        {"rms_norm_eps": 1e-3},
    ],
)
def test_heads_are_those_that_transformers_reads(write, family, keys):
    folder = write(base(family, **keys))
    ours, theirs = load_model_config(folder), AutoConfig.from_pretrained(folder)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps


def test_null_kv_heads_mean_one_for_each_head(write):
    folder = write(base(num_key_value_heads=None))
    assert load_model_config(folder).num_kv_heads == AutoConfig.from_pretrained(folder).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("llama", {}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 8}, (8,) * 4),
        ("qwen2", {"sliding_window": 8}, (None,) * 4),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8,) * 4),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None,) * 4),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096, 4096)),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (8, None, None, 8),
        ),
        ("gemma2", {"sliding_window": 8}, (8, None, 8, None)),
        ("gemma2", {}, (4096, None, 4096, None)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        ("gemma3_text", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("gpt_oss", {**GPT_OSS, "sliding_window": 8}, (8, None, 8, None)),
        ("gpt_oss", GPT_OSS, (128, None, 128, None)),
        ("olmo3", {"sliding_window": 8}, (8, 8, 8, None)),
        ("phi3", {"sliding_window": 8}, (8,) * 4),
        ("smollm3", {"sliding_window": 8}, (None,) * 4),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None, 8)),
        (
            "smollm3",
            {"sliding_window": 8, "use_sliding_window": True, "no_rope_layers": [0, 1, 1, 1]},
            (8, *[None] * 3),
        ),
    ],
)
def test_windows_are_those_that_transformers_gives_each_layer(write, family, keys, windows):
    folder = write(base(family, **keys))
    assert load_model_config(folder).windows == windows
    theirs = AutoConfig.from_pretrained(folder)
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(theirs, "sliding_window", None)
    assert tuple(window if kind == "sliding_attention" else None for kind in layer_types) == windows


def test_mixtral_rotates_by_its_own_base_where_none_is_given(write):
    config = load_model_config(write(base("mixtral", num_local_experts=4, num_experts_per_tok=2)))
    assert config.rope == RopeConfig(1e6, None)


def test_rope_bases_of_gemma_3_are_read_in_the_old_form_and_the_new(write):
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    for keys in (old, {"rope_parameters": new}):
        config = load_model_config(write(base("gemma3_text", **keys)))
        assert config.rope == RopeConfig(5e5, LinearScaling(8.0))
        assert config.local_rope == RopeConfig(2e4, None)
        assert config.context_tokens == 512
    absent = load_model_config(write(base("gemma3_text")))
    assert (absent.rope, absent.local_rope) == (RopeConfig(1e6, None), RopeConfig(1e4, None))


def test_caps_that_gemma_2_does_not_mention_are_its_own_and_null_is_none(write):
    absent, null = (
        load_model_config(write(base("gemma2", **keys)))
        for keys in ({}, {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    )
    assert (absent.score_cap, absent.logit_cap) == (50.0, 30.0)
    assert (null.score_cap, null.logit_cap) == (None, None)


PUBLISHED_GPT_OSS = """{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
"eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
"initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
"layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072, "model_type": "gpt_oss",
"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8,
"num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
"quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
"rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
"swiglu_limit": 7.0, "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088}"""


def test_gpt_oss_is_read_as_it_is_published(write):
    config = load_model_config(write(json.loads(PUBLISHED_GPT_OSS)))
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_active) == (32, 4)
    assert config.experts.gate == ClampedSwiglu(1.702, 7.0)
    assert (config.windows, config.qkv_bias, config.output_bias, config.traits.sinks) == ((128, None), True, True, True)
    assert config.context_tokens == 131072


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (base("gemma4"), "model_type: 'gemma4' is not supported"),
        (base(model_type="absent"), "model_type: is missing"),
        (base(architectures=["LlamaForSequenceClassification"]), "architectures"),
        (base(hidden_act="gelu"), "hidden_act"),
        (base(vocab_size="absent"), "vocab_size: is missing"),
        (base(hidden_size="64"), "hidden_size"),
        (base(num_hidden_layers=0), "num_hidden_layers"),
        (base(num_hidden_layers=True), "num_hidden_layers"),
        (base(num_key_value_heads=3), "num_key_value_heads"),
        (base(num_attention_heads=5, num_key_value_heads=5), "num_attention_heads"),
        (base(head_dim=7), "head_dim"),
        (base(rms_norm_eps=0), "rms_norm_eps"),
        (base(tie_word_embeddings="yes"), "tie_word_embeddings"),
        (base(sliding_window=8), "sliding_window"),
        (base(torch_dtype="float8_e4m3fn"), "torch_dtype"),
        (base("mistral", layer_types=["full_attention", "sliding_attention"] * 2), "layer_types"),
        (base("qwen2", layer_types=["full_attention"]), "layer_types: has 1 entries"),
        (base("qwen2", layer_types=["full_attention", "chunked_attention"] * 2), "chunked_attention"),
        (base("qwen2", layer_types=["sliding_attention"] * 4), "layer_types: has sliding_attention"),
        (base("qwen2", layer_types="full_attention"), "layer_types"),
        (base("gemma2", hidden_activation="silu"), "hidden_activation: only gelu_pytorch_tanh"),
        (base("gemma3_text", attn_logit_softcapping=5.0), "attn_logit_softcapping: gemma3_text has none"),
        (base("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention: only causal"),
        (base(final_logit_softcapping=5.0), "final_logit_softcapping: llama has none"),
        (base("smollm3", no_rope_layers=[1]), "no_rope_layers: is not 0 or 1 for each of 4 layers"),
        (base("phi3", rope_scaling={"type": "longrope"}), "short_factor: is missing"),
        (base("phi3", rope_scaling=LONG | {"long_factor": [1.0, -2.0]}), "long_factor.1: is -2.0"),
        (base("phi3", rope_scaling=LONG), "rope_scaling: has 2 factors for 8 frequencies"),
        (base("llama", partial_rotary_factor=0.75), "partial_rotary_factor: is 0.75"),
        (base("gpt_oss", **(GPT_OSS | {"rope_scaling": None})), "rope_scaling: is missing, which gpt_oss needs"),
        (base("gpt_oss", **GPT_OSS, swiglu_limit=0), "swiglu_limit"),
    ],
)
def test_what_is_not_understood_is_refused_by_file_and_key(write, config, named):
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}"):
        load_model_config(write(config))


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: file is missing"):
        load_model_config(tmp_path)
