"""config.json becomes a ModelConfig as transformers would read it, or is refused by key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from models.config import load_model_config
from tandem.errors import CheckpointError
from tandem.kv_layout import DType


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
    ],
)
def test_windows_are_those_that_transformers_gives_each_layer(write, family, keys, windows):
    folder = write(base(family, **keys))
    assert load_model_config(folder).windows == windows
    theirs = AutoConfig.from_pretrained(folder)
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(theirs, "sliding_window", None)
    assert tuple(window if kind == "sliding_attention" else None for kind in layer_types) == windows


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (base("gemma3"), "model_type: 'gemma3' is not supported"),
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
