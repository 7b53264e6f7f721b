"""Quantised checkpoints compute what their weights mean, or are refused by key and tensor."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from bench.support.tiny_models import TinyModel
from kernels.dispatch import available_backends, select_kernels
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.loading import load_model
from tandem.errors import CheckpointError, ConfigError
from tests.paged_driver import (
    change_json,
    change_tensors,
    load_tiny,
    load_transformers,
    logits_of,
    random_prompt,
    transformers_logits,
)
from tests.quantized_checkpoints import FORMS, awq, gptq, packed, write

TINY = TinyModel("llama", "llama")
DOWN = "model.layers.1.mlp.down_proj"
TORCHAO = next(form for form in FORMS if form.name.startswith("torchao-Intx"))
SCALED = next(form for form in FORMS if form.name == "fp8-blocks")


class KeepingOperations(ReferenceOperations):
    """Takes quantised weights as they are, and notes them."""

    def __init__(self):
        self.taken = []

    def keeps(self, weight):
        return True

    def linear(self, weight, bias):
        self.taken.append(weight)
        return super().linear(weight, bias)


@pytest.fixture
def written(checkpoint, tmp_path):
    return lambda form: write(form, checkpoint(TINY), tmp_path)


def kernels_of(name):
    device, dtype = torch.device("cpu"), torch.float32
    if not next(status for status in available_backends(device, dtype) if status.name == name).usable:
        pytest.skip(f"no {name} kernels here")
    return select_kernels(name, device, dtype)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_quantised_checkpoint_computes_what_transformers_does_with_the_weights_that_it_means(written, form, kernels):
    quantized, meant = written(form)
    ours = logits_of(load_model(quantized, "float32", torch.device("cpu"), kernels_of(kernels)))
    theirs = transformers_logits(load_transformers(meant), random_prompt(40))
    assert theirs.std() > 1
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def held_form(name):
    if "nvfp4" in name:
        return QuantForm.FP4
    if any(part in name.lower() for part in ("fp8", "float", "naive")):
        return QuantForm.FP8
    return QuantForm.INT4 if name.startswith(("gptq-4", "awq", "pack-quantized-4")) else QuantForm.INT8


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_weights_reach_the_kernels_in_the_form_that_they_have(written, form):
    operations = KeepingOperations()
    quantized, _ = written(form)
    load_model(quantized, "float32", torch.device("cpu"), Kernels(ReferenceBackend(), operations))
    maps = operations.taken[:-1]
    assert len(maps) == 4 * 2
    assert isinstance(operations.taken[-1], torch.Tensor)  # the output projection was left as it is
    if "act-order" in form.name:
        assert all(isinstance(weight, torch.Tensor) for weight in maps)
        return
    assert {weight.form for weight in maps} == {held_form(form.name)}


def test_a_module_that_was_left_as_it_is_may_be_any(written):
    quantized, meant = written(gptq(4))
    plain = load_file(meant / "model.safetensors")[f"{DOWN}.weight"]

    def restore(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{DOWN}.{part}")
        tensors[f"{DOWN}.weight"] = plain

    before = logits_of(load_tiny(quantized, "float32"))
    change_tensors(quantized, restore)
    torch.testing.assert_close(logits_of(load_tiny(quantized, "float32")), before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("form", "part"),
    [
        *((gptq(4), part) for part in ("qweight", "qzeros", "scales")),
        *((awq(), part) for part in ("qweight", "qzeros", "scales")),
        *((packed(4, group=32, symmetric=True), part) for part in ("weight_packed", "weight_scale", "weight_shape")),
        *((SCALED, part) for part in ("weight", "weight_scale_inv")),
        *((TORCHAO, part) for part in ("_weight_qdata", "_weight_scale")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_missing_or_misshapen_part_is_refused_by_name(written, form, part):
    quantized, _ = written(form)
    name = f"{DOWN}.{part}"
    intact = load_file(quantized / "model.safetensors")[name]
    change_tensors(quantized, lambda tensors: tensors.update({name: torch.cat((intact, intact)).contiguous()}))
    with pytest.raises(CheckpointError, match=rf"^{name}: .* has shape"):
        load_tiny(quantized)
    change_tensors(quantized, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"^{name}: tensor is missing|^{DOWN}\.\w+: tensor"):
        load_tiny(quantized)


def test_an_extra_part_is_refused_by_name(written):
    quantized, _ = written(SCALED)
    change_tensors(quantized, lambda tensors: tensors.update({f"{DOWN}.qzeros": torch.zeros(1, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=rf"^{DOWN}\.qzeros: .* does not belong"):
        load_tiny(quantized)


def test_a_bias_that_the_model_has_not_may_be_there_only_if_it_is_zero(written):
    quantized, _ = written(gptq(4, zero_bias=True))
    change_tensors(quantized, lambda tensors: tensors[f"{DOWN}.bias"][3].fill_(1.0))
    with pytest.raises(CheckpointError, match=rf"^{DOWN}\.bias: .* not zero"):
        load_tiny(quantized)


def test_groups_beyond_the_scales_are_refused_by_name(written):
    quantized, _ = written(gptq(4))
    change_tensors(quantized, lambda tensors: tensors[f"{DOWN}.g_idx"][3].fill_(9))
    with pytest.raises(CheckpointError, match=rf"^{DOWN}: g_idx names groups beyond the 3"):
        load_tiny(quantized)


def test_scales_of_kv_are_not_used(written):
    quantized, _ = written(SCALED)
    change_tensors(quantized, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    load_tiny(quantized)


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        (gptq(4), {"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes' is not read .*--quantize"),
        (gptq(4), {"bits": 3}, "bits: 3 bits are not read"),
        (gptq(4), {"checkpoint_format": "marlin"}, "checkpoint_format: only gptq and gptq_v2"),
        (gptq(4), {"group_size": 0}, "group_size"),
        (awq(), {"version": "gemv"}, "version: only gemm"),
        (awq(), {"zero_point": False}, "zero_point"),
        (SCALED, {"weight_block_size": [128]}, "weight_block_size"),
        (TORCHAO, {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "quant_type: 'Int4WeightOnlyConfig'"),
        (packed(4, group=32, symmetric=True), {"format": "mxfp4-pack-quantized"}, "format: 'mxfp4"),
        (packed(4, group=32, symmetric=True), {"quant_method": "modelopt"}, "quant_algo: '' is not read .*--quantize"),
        (packed(4, group=32, symmetric=True), {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        (packed(4, group=32, symmetric=True), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_read_is_refused_by_key(written, form, changes, named):
    quantized, _ = written(form)
    change_json(quantized / "config.json", lambda config: config["quantization_config"].update(changes))
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config\.{named}"):
        load_tiny(quantized)


@pytest.mark.parametrize("form", list(QuantForm))
def test_a_plain_checkpoint_is_rounded_at_load_its_output_projection_too(checkpoint, form):
    operations = KeepingOperations()
    model = load_model(checkpoint(TINY), "float32", torch.device("cpu"), Kernels(ReferenceBackend(), operations), form)
    plain = load_tiny(checkpoint(TINY), "float32")
    assert [weight.form for weight in operations.taken] == [form] * 9
    assert torch.equal(model.decoder.embedding.table, plain.decoder.embedding.table)
    assert model.fingerprint != plain.fingerprint


def test_forms_have_fingerprints_of_their_own(checkpoint):
    seen = {load_tiny(checkpoint(TINY), None, form).fingerprint for form in (None, *QuantForm)}
    assert len(seen) == 1 + len(QuantForm)


def test_a_quantised_checkpoint_is_not_rounded_again(written):
    quantized, _ = written(awq())
    with pytest.raises(ConfigError, match=r"--quantize.*already \(awq\)"):
        load_tiny(quantized, None, QuantForm.INT8)


def test_a_tied_model_keeps_its_embedding_and_rounds_the_projection(checkpoint):
    operations = KeepingOperations()
    folder = checkpoint(TinyModel("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}))
    model = load_model(folder, None, torch.device("cpu"), Kernels(ReferenceBackend(), operations), QuantForm.INT8)
    assert model.decoder.embedding.table.dtype is torch.float32
    assert operations.taken[-1].form is QuantForm.INT8
