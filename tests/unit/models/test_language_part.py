"""Of checkpoints that take images too the language part is served, with the tokens of transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from bench.support.tiny_language_parts import TINY_LANGUAGE_PARTS
from models.config import load_model_config
from models.files.checkpoint import read_checkpoint
from models.files.language_part import CONTAINERS
from models.preflight import read_servable
from tandem.errors import CheckpointError
from tests.paged_driver import PagedDriver, edited, load_tiny, random_prompt, reference_tokens

KINDS = {tiny.family: tiny for tiny in TINY_LANGUAGE_PARTS}


def test_each_kind_that_is_served_has_its_checkpoint():
    assert KINDS.keys() == CONTAINERS.keys()


@pytest.fixture(scope="module", params=KINDS)
def folder(request, checkpoint):
    """A checkpoint as transformers saves it."""
    return checkpoint(KINDS[request.param])


def test_tokens_of_the_language_part_are_those_of_transformers(folder):
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    prompts = [random_prompt(length) for length in (1, 17, 129)]
    expected = [reference_tokens(reference, prompt, 12) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 3  # spread enough to tell tokens apart
    driver = PagedDriver(load_tiny(folder, "float32"), 16, 100)
    with torch.inference_mode():
        assert driver.generate(prompts, 12, 64) == expected
    assert read_servable(str(folder)).implementation == "native"
    assert read_checkpoint(str(folder)).vocab_size == 320


OTHER_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
"""The same tensors, as transformers names them in memory."""


def renamed(folder, tmp_path, names):
    copy = shutil.copytree(folder, tmp_path / "renamed")
    tensors = {}
    for name, tensor in load_file(copy / "model.safetensors").items():
        old = next((each for each in names if name.startswith(each)), "")
        tensors[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def greedy(folder):
    with torch.inference_mode():
        return PagedDriver(load_tiny(folder, "float32"), 16, 100).generate([random_prompt(33)], 12, 64)


def test_tensors_may_have_either_names(folder, tmp_path):
    names = set(load_file(folder / "model.safetensors"))
    is_old = any(name.startswith("language_model.") for name in names)
    turned = OTHER_NAMES if is_old else {new: old for old, new in OTHER_NAMES.items()}
    assert greedy(renamed(folder, tmp_path, turned)) == greedy(folder)


@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True)
def test_a_config_without_a_section_for_text_is_read_whole(folder, tmp_path):
    def flatten(config):
        text = config.pop("text_config")
        config |= {key: text[key] for key in text if key not in {"model_type", "architectures", "rope_parameters"}}
        config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}

    assert greedy(edited(folder, tmp_path, flatten)) == greedy(folder)


@pytest.mark.parametrize("folder", ["llava"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("text_config.hidden_act", "gelu", "text_config.hidden_act: only silu"),
        ("text_config", 3, "text_config: is not an object"),
        ("architectures", ["LlavaForRanking"], "architectures: LlavaForConditionalGeneration is the only one"),
    ],
)
def test_what_is_not_served_is_refused_by_key(folder, tmp_path, key, value, words):
    def edit(config):
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        config[last] = value

    copy = edited(folder, tmp_path, edit)
    with pytest.raises(CheckpointError, match=words):
        load_tiny(copy, "float32")


@pytest.mark.parametrize("folder", ["llava"], indirect=True)
@pytest.mark.parametrize("family", ["ministral3", "cohere"])
def test_only_native_families_are_served_as_a_language_part(folder, tmp_path, family):
    copy = edited(folder, tmp_path, lambda config: config["text_config"].update(model_type=family))
    with pytest.raises(CheckpointError, match=rf"text_config\.model_type: '{family}' is not served as the"):
        read_servable(str(copy))
    with pytest.raises(CheckpointError, match="model_type"):
        load_tiny(copy, "float32")


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
def test_a_tensor_of_neither_part_is_refused(folder, tmp_path):
    copy = renamed(folder, tmp_path, {})
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(2)}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"audio_tower\.weight"):
        load_tiny(copy, "float32")


def test_gemma_3_says_little_of_its_language_part(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    ours, theirs = load_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path).text_config
    assert (ours.hidden_size, ours.num_heads, ours.num_kv_heads) == (2560, theirs.num_attention_heads, 4)
    assert (ours.vocab_size, ours.context_tokens) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert ours.tied


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40},
    ],
    ids=lambda text: text["model_type"],
)
def test_llava_says_little_of_its_language_part(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    ours, theirs = load_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path).text_config
    assert (ours.hidden_size, ours.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.vocab_size, ours.context_tokens) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert ours.intermediate_size == theirs.intermediate_size
