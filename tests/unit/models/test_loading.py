"""Checkpoints load whole and as saved, or are refused by file and tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.support.tiny_models import TinyModel, save_tiny_model
from models.loading import load_model
from tandem.errors import CheckpointError, ConfigError
from tandem.kv_layout import DType, KvLayout

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


def change(folder, edit, file_name="model.safetensors"):
    tensors = load_file(folder / file_name)
    edit(tensors)
    save_file(tensors, folder / file_name, metadata={"format": "pt"})


def change_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def logits(tools, model):
    return tools.driver(model, 16, 2).step([(tools.seq(tools.random_prompt(20)), 20)])


def test_shards_give_the_same_model_as_one_file(tools, folder, sharded_folder):
    one, sharded = tools.load(folder), tools.load(sharded_folder)
    assert torch.equal(logits(tools, one), logits(tools, sharded))


@pytest.mark.parametrize("dtype", list(DType))
def test_auto_is_the_dtype_of_the_config(tools, folder, dtype):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype.value}))
    model = tools.load(folder, "auto")
    assert model.dtype is dtype
    assert model.kv_layout(16) == KvLayout(
        *(config["num_hidden_layers"], config["num_key_value_heads"], 16, config["head_dim"], dtype)
    )
    assert logits(tools, model).dtype == model.torch_dtype


def test_auto_without_a_word_in_the_config_is_the_dtype_of_the_weights(tools, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if "dtype" not in key}))
    change(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16() for name in tensors}))
    assert tools.load(folder).dtype is DType.BFLOAT16


def test_weights_may_be_cast_to_another_dtype(tools, folder):
    assert tools.load(folder, "bfloat16").dtype is DType.BFLOAT16


def test_an_unknown_dtype_is_a_bad_option(tools, folder):
    with pytest.raises(ConfigError, match="--dtype"):
        tools.load(folder, "int8")


def test_weights_are_copies_that_outlive_the_file(tools, folder):
    model = tools.load(folder)
    before = logits(tools, model)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert torch.equal(logits(tools, model), before)


def test_fingerprint_is_that_of_config_weights_and_dtype(tools, folder):
    first = tools.load(folder)
    assert len(first.fingerprint) == 32
    assert tools.load(folder).fingerprint == first.fingerprint
    assert tools.load(folder, "bfloat16").fingerprint != first.fingerprint
    change(folder, lambda tensors: tensors[LAYER_TENSOR].view(-1)[7:8].add_(1e-3))
    assert tools.load(folder).fingerprint != first.fingerprint


def test_stored_rope_frequencies_of_old_checkpoints_are_ignored(tools, folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    tools.load(folder)


def test_a_tied_model_may_store_its_embedding_twice(tools, tied_folder):
    change(tied_folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    tools.load(tied_folder)


def test_a_tied_model_with_another_output_projection_is_refused(tools, tied_folder):
    change(tied_folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: tensor in .*model\.safetensors does not belong"):
        tools.load(tied_folder)


@pytest.mark.parametrize("name", [LAYER_TENSOR, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_refused_by_name(tools, folder, name):
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"^{name}: tensor is missing from .*copy"):
        tools.load(folder)


def test_an_extra_tensor_is_refused_by_name(tools, folder):
    change(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"^model\.layers\.1\.self_attn\.q_proj\.bias: tensor in .*not belong"):
        tools.load(folder)


def test_a_misshapen_tensor_is_refused_by_name(tools, folder):
    change(folder, lambda tensors: tensors.update({LAYER_TENSOR: torch.ones(64, 32)}))
    with pytest.raises(CheckpointError, match=rf"^{LAYER_TENSOR}: .* has shape \[64, 32\], not \[64, 64\]"):
        tools.load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_a_tensor_of_an_unsupported_type_is_refused_by_name(tools, folder, dtype):
    change(folder, lambda tensors: tensors.update({LAYER_TENSOR: tensors[LAYER_TENSOR].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"^{LAYER_TENSOR}: .* has type"):
        tools.load(folder)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused_by_name(tools, folder, kept_bytes):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no readable safetensors file"):
        tools.load(folder)


def test_a_corrupt_header_is_refused_by_name(tools, folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[:40] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no readable safetensors file"):
        tools.load(folder)


def test_other_formats_are_not_read(tools, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: file is missing.*only safetensors"):
        tools.load(folder)


def test_a_missing_shard_is_refused_by_name(tools, sharded_folder):
    next(iter(sharded_folder.glob("model-00002-*"))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.*: file is missing"):
        tools.load(sharded_folder)


def test_a_tensor_that_is_not_where_the_index_says_is_refused(tools, sharded_folder):
    def misplace(index):
        other = next(file for file in index["weight_map"].values() if file != index["weight_map"][LAYER_TENSOR])
        index["weight_map"][LAYER_TENSOR] = other

    change_index(sharded_folder, misplace)
    with pytest.raises(CheckpointError, match=rf"^{LAYER_TENSOR}: tensor is missing from model-"):
        tools.load(sharded_folder)


def test_a_tensor_in_two_shards_is_refused(tools, sharded_folder):
    first, second, *_ = sorted(path.name for path in sharded_folder.glob("model-*"))
    name, tensor = next(iter(load_file(sharded_folder / first).items()))
    change(sharded_folder, lambda tensors: tensors.update({name: tensor}), second)
    with pytest.raises(CheckpointError, match=rf"{second}: {name}: tensor is also in {first}"):
        tools.load(sharded_folder)


@pytest.mark.parametrize("value", ["../copy/model.safetensors", 7])
def test_an_index_that_leaves_the_folder_is_refused(tools, sharded_folder, value):
    change_index(sharded_folder, lambda index: index["weight_map"].update({LAYER_TENSOR: value}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map"):
        tools.load(sharded_folder)


def test_an_empty_index_is_refused(tools, sharded_folder):
    change_index(sharded_folder, lambda index: index.pop("weight_map"))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: is missing or empty"):
        tools.load(sharded_folder)


def test_a_folder_that_is_not_there_is_refused(tools, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json: file is missing"):
        load_model(tmp_path / "nowhere", None, torch.device("cpu"), None)
