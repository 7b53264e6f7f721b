"""Models that transformers computes with our parts: the tokens are transformers' own; what would differ is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bench.support.tiny_models import TinyModel
from bench.support.tiny_transformers import TINY_TRANSFORMERS
from kernels.dispatch import select_kernels
from kernels.quantized import QuantForm, quantize
from models import transformers_loading
from models.loading import load_model
from models.preflight import read_servable
from tandem.errors import CheckpointError, ConfigError
from tests.paged_driver import PagedDriver, PagedSeq, edited, load_transformers, random_prompt, reference_tokens

CPU = torch.device("cpu")
BY_NAME = {tiny.name: tiny for tiny in TINY_TRANSFORMERS}


def load(folder, dtype="float32", form=None):
    return load_as(folder, "transformers", dtype, form)


def load_as(folder, implementation, dtype="float32", form=None):
    kernels = select_kernels("auto", CPU, getattr(torch, dtype))
    return load_model(folder, dtype, CPU, kernels, form, implementation)


def generated(model, prompts, block_size, chunk_tokens, max_tokens=12):
    with torch.inference_mode():
        return PagedDriver(model, block_size, 800).generate(prompts, max_tokens, chunk_tokens)


@pytest.mark.parametrize("tiny", TINY_TRANSFORMERS, ids=lambda tiny: tiny.name)
def test_greedy_tokens_are_those_of_transformers(checkpoint, tiny):
    folder = checkpoint(tiny)
    reference = load_transformers(folder)
    prompts = [random_prompt(length) for length in (1, 17, 129)]
    expected = [reference_tokens(reference, prompt, 12) for prompt in prompts]
    assert generated(load(folder), prompts, 16, 64) == expected


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(1, 64), (64, 512)])
def test_blocks_and_chunks_change_no_token(checkpoint, name, block_size, chunk_tokens):
    model = load(checkpoint(BY_NAME[name]))
    prompts = [random_prompt(length) for length in (15, 64, 130)]
    assert generated(model, prompts, block_size, chunk_tokens) == generated(model, prompts, 16, 33)


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_weights_are_copies_that_outlive_the_file(checkpoint, tmp_path, name):
    folder = shutil.copytree(checkpoint(BY_NAME[name]), tmp_path / name)
    model, prompts = load(folder), [random_prompt(20)]
    before = generated(model, prompts, 16, 64)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 4)
        file.write(b"\0" * (size - size // 4))
    assert generated(model, prompts, 16, 64) == before


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_a_token_has_the_same_bits_alone_and_beside_others(checkpoint, name):
    model = load(checkpoint(BY_NAME[name]), "bfloat16")
    prompt, others = random_prompt(40), [random_prompt(n) for n in (3, 60, 17)]

    def logits(beside):
        driver = PagedDriver(model, 16, 40)
        work = [(PagedSeq(list(each)), len(each)) for each in (prompt, *beside)]
        with torch.inference_mode():
            return driver.step(work)[: len(prompt)]

    assert torch.equal(logits([]), logits(others))


def test_linear_maps_may_be_quantised(checkpoint):
    folder = checkpoint(BY_NAME["qwen3_moe"])
    plain, rounded = (load(folder, form=form) for form in (None, QuantForm.INT8))
    prompts = [random_prompt(20)]
    assert generated(plain, prompts, 16, 64)
    assert generated(rounded, prompts, 16, 64)
    assert plain.fingerprint != rounded.fingerprint


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen2_moe"])
def test_what_chooses_experts_is_not_quantised(checkpoint, monkeypatch, name):
    rounded = []
    monkeypatch.setattr(
        transformers_loading, "quantize", lambda weight, form: rounded.append(len(weight)) or quantize(weight, form)
    )
    folder = checkpoint(BY_NAME[name])
    load(folder, form=QuantForm.INT8)
    config = AutoConfig.from_pretrained(folder)
    experts = {getattr(config, key, 1) for key in ("num_experts", "num_local_experts")} | {1}
    assert rounded
    assert experts.isdisjoint(rounded)


def test_auto_takes_native_where_there_is_one(checkpoint):
    kernels = select_kernels("auto", CPU, torch.float32)
    llama, gemma = (checkpoint(BY_NAME[name]) for name in ("llama", "gemma"))
    native, foreign = (load_model(folder, "float32", CPU, kernels) for folder in (llama, gemma))
    assert native.fingerprint != load(llama).fingerprint  # their KV differs in the last bits: no pair
    assert foreign.fingerprint == load(gemma).fingerprint


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not served"),
        ({"model_type": "nobody-knows"}, "nobody-knows"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type: 'dynamic'",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(checkpoint, tmp_path, keys, words):
    with pytest.raises(CheckpointError, match=words):
        load(edited(checkpoint(BY_NAME["gemma"]), tmp_path, **keys))


HUNYUAN_ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
"""As the family is published."""


def test_a_dynamic_rope_of_a_fixed_alpha_is_served_as_published(checkpoint, tmp_path):
    keys = {"rope_parameters": None, "rope_theta": 10000.0, "max_position_embeddings": 64}
    saved = checkpoint(BY_NAME["hunyuan_v1_dense"])
    folder = edited(saved, tmp_path, rope_scaling=HUNYUAN_ROPE, **keys)
    prompts = [random_prompt(length) for length in (1, 40, 100)]  # the last is beyond the context
    reference = load_transformers(folder)
    expected = [reference_tokens(reference, prompt, 12) for prompt in prompts]
    assert read_servable(str(folder)).implementation == "transformers"
    assert generated(load(folder), prompts, 16, 64) == expected
    plain = edited(saved, tmp_path / "plain", rope_scaling=None, **keys)
    assert generated(load(plain), prompts, 16, 64) != expected


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic'"),
        ("hunyuan_v1_dense", {"head_dim": None}, "head_dim: is missing"),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: 'linear'"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type: 'yarn'"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type: 'longrope'"),
    ],
)
def test_what_turns_by_the_longest_text_of_a_step_is_refused_before_a_weight_is_read(
    checkpoint, tmp_path, name, keys, words
):
    folder = edited(checkpoint(BY_NAME[name]), tmp_path, **keys)
    with pytest.raises(CheckpointError, match=words):
        read_servable(str(folder), "transformers")


@pytest.mark.parametrize(("name", "implementation"), [("gemma", "native"), ("gpt_oss", "transformers")])
def test_an_implementation_that_does_not_have_the_family_is_refused(checkpoint, tmp_path, name, implementation):
    folder = edited(checkpoint(BY_NAME["gemma"]), tmp_path, model_type=name, architectures=None, rope_parameters=None)
    for judge in (lambda: read_servable(str(folder), implementation), lambda: load_as(folder, implementation)):
        with pytest.raises(ConfigError, match=f"--model-impl: {implementation} does not have {name}"):
            judge()


def test_missing_and_surplus_tensors_are_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(BY_NAME["olmo2"]), tmp_path / "broken")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    taken = tensors.pop("model.layers.0.mlp.down_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys.*down_proj"):
        load(folder)
    save_file(
        tensors | {"model.layers.0.mlp.down_proj.weight": taken, "stranger": taken.clone()}, path, {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"unexpected keys.*stranger"):
        load(folder)


def test_code_of_a_checkpoint_is_never_run(checkpoint, tmp_path):
    folder = edited(checkpoint(BY_NAME["gemma"]), tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('it was run')\n")
    load(folder)


def test_layers_that_do_not_attend_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("models.preflight.FAMILIES", frozenset({"minimax"}))
    monkeypatch.setattr("models.preflight.check_transformers_config", lambda config: None)
    tiny = TinyModel("minimax", "minimax", {"num_local_experts": 2, "head_dim": 16})
    AutoModelForCausalLM.from_config(tiny.config()).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "minimax"
    with pytest.raises(CheckpointError, match="minimax is not supported"):
        load(tmp_path)
