"""Checkpoints load whole and as saved, or are refused by file and tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from bench.support.tiny_models import TinyModel, save_tiny_model
from models.loading import load_model
from tandem.errors import CheckpointError, ConfigError
from tandem.kv_layout import DType, KvLayout
from tests.paged_driver import change_json, change_tensors, load_tiny, logits_of

TINY = TinyModel("llama", "llama")
TIED = TinyModel("qwen2", "qwen2", {"tie_word_embeddings": True})
LAYER_TENSOR = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint(TINY), tmp_path / "copy")


@pytest.fixture
def tied_folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint(TIED), tmp_path / "copy")


@pytest.fixture
def sharded_folder(tmp_path):
    folder = save_tiny_model(TINY, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def change_index(folder, edit):
    change_json(folder / "model.safetensors.index.json", edit)


def test_shards_give_the_same_model_as_one_file(folder, sharded_folder):
    one, sharded = load_tiny(folder), load_tiny(sharded_folder)
    assert torch.equal(logits_of(one), logits_of(sharded))


@pytest.mark.parametrize("dtype", list(DType))
def test_auto_is_the_dtype_of_the_config(folder, dtype):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype.value}))
    model = load_tiny(folder, "auto")
    assert model.dtype is dtype
    assert model.kv_layout(16) == KvLayout(
        *(config["num_hidden_layers"], config["num_key_value_heads"], 16, config["head_dim"], dtype)
    )
    assert logits_of(model).dtype == model.torch_dtype


def test_auto_without_a_word_in_the_config_is_the_dtype_of_the_weights(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if "dtype" not in key}))
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16() for name in tensors}))
    assert load_tiny(folder).dtype is DType.BFLOAT16


def test_weights_may_be_cast_to_another_dtype(folder):
    assert load_tiny(folder, "bfloat16").dtype is DType.BFLOAT16


def test_an_unknown_dtype_is_a_bad_option(folder):
    with pytest.raises(ConfigError, match="--dtype"):
        load_tiny(folder, "int8")


def test_weights_are_copies_that_outlive_the_file(folder):
    model = load_tiny(folder)
    before = logits_of(model)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert torch.equal(logits_of(model), before)


def test_fingerprint_is_that_of_config_weights_and_dtype(folder):
    first = load_tiny(folder)
    assert len(first.fingerprint) == 32
    assert load_tiny(folder).fingerprint == first.fingerprint
    assert load_tiny(folder, "bfloat16").fingerprint != first.fingerprint
    change_tensors(folder, lambda tensors: tensors[LAYER_TENSOR].view(-1)[7:8].add_(1e-3))
    assert load_tiny(folder).fingerprint != first.fingerprint


def test_stored_rope_frequencies_of_old_checkpoints_are_ignored(folder):
    change_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load_tiny(folder)


def test_a_tied_model_may_store_its_embedding_twice(tied_folder):
    change_tensors(tied_folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_tiny(tied_folder)


def test_a_tied_model_with_another_output_projection_is_refused(tied_folder):
    change_tensors(tied_folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: tensor in .*model\.safetensors does not belong"):
        load_tiny(tied_folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        *(
            (lambda tensors, name=name: tensors.pop(name), rf"^{name}: tensor is missing from .*copy")
            for name in (LAYER_TENSOR, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}),
            r"^model\.layers\.1\.self_attn\.q_proj\.bias: tensor in .*not belong",
        ),
        (
            lambda tensors: tensors.update({LAYER_TENSOR: torch.ones(64, 32)}),
            rf"^{LAYER_TENSOR}: .* has shape \[64, 32\], not \[64, 64\]",
        ),
        *(
            (
                lambda t, dtype=dtype: t.update({LAYER_TENSOR: t[LAYER_TENSOR].to(dtype)}),
                rf"^{LAYER_TENSOR}: .* has type",
            )
            for dtype in (torch.int8, torch.float64, torch.float8_e4m3fn)
        ),
    ],
)
def test_a_tensor_that_is_missing_extra_misshapen_or_of_another_type_is_refused_by_name(folder, edit, message):
    change_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load_tiny(folder)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000, -1, None])
def test_a_file_that_is_truncated_or_has_a_corrupt_header_is_refused_by_name(folder, kept_bytes):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 40 + content[40:] if kept_bytes is None else content[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no readable safetensors file"):
        load_tiny(folder)


def test_other_formats_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: file is missing.*only safetensors"):
        load_tiny(folder)


def test_a_missing_shard_is_refused_by_name(sharded_folder):
    next(iter(sharded_folder.glob("model-00002-*"))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.*: file is missing"):
        load_tiny(sharded_folder)


def test_a_tensor_that_is_not_where_the_index_says_is_refused(sharded_folder):
    def misplace(index):
        other = next(file for file in index["weight_map"].values() if file != index["weight_map"][LAYER_TENSOR])
        index["weight_map"][LAYER_TENSOR] = other

    change_index(sharded_folder, misplace)
    with pytest.raises(CheckpointError, match=rf"^{LAYER_TENSOR}: tensor is missing from model-"):
        load_tiny(sharded_folder)


def test_a_tensor_in_two_shards_is_refused(sharded_folder):
    first, second, *_ = sorted(path.name for path in sharded_folder.glob("model-*"))
    name, tensor = next(iter(load_file(sharded_folder / first).items()))
    change_tensors(sharded_folder, lambda tensors: tensors.update({name: tensor}), second)
    with pytest.raises(CheckpointError, match=rf"{second}: {name}: tensor is also in {first}"):
        load_tiny(sharded_folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index["weight_map"].update({LAYER_TENSOR: "../copy/model.safetensors"}), "weight_map"),
        (lambda index: index["weight_map"].update({LAYER_TENSOR: 7}), "weight_map"),
        (lambda index: index.pop("weight_map"), "weight_map: is missing or empty"),
    ],
)
def test_an_index_that_is_empty_or_leaves_the_folder_is_refused(sharded_folder, edit, message):
    change_index(sharded_folder, edit)
    with pytest.raises(CheckpointError, match=rf"index\.json: {message}"):
        load_tiny(sharded_folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json: file is missing"):
        load_model(tmp_path / "nowhere", None, torch.device("cpu"), None)
