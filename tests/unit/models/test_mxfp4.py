"""gpt-oss as it is published, with experts in MXFP4, computes what its values mean."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from bench.support.tiny_models import TINY_MODELS
from kernels.dispatch import select_kernels
from kernels.operations import Kernels
from kernels.quantized import QuantForm, QuantizedWeight
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.loading import load_model
from tandem.errors import CheckpointError
from tests.paged_driver import (
    change_tensors,
    load_tiny,
    load_transformers,
    logits_of,
    random_prompt,
    transformers_logits,
)
from tests.quantized_checkpoints import write_mxfp4

TINY = next(tiny for tiny in TINY_MODELS if tiny.name == "gpt-oss")
CPU = torch.device("cpu")
EXPERTS = "model.layers.1.mlp.experts"


class Packing(ReferenceOperations):
    """Notes which weights it was given."""

    def __init__(self):
        self.packed = []

    def linear(self, weight, bias):
        self.packed.append(weight)
        return super().linear(weight, bias)


@pytest.fixture
def written(checkpoint, tmp_path):
    return write_mxfp4(checkpoint(TINY), tmp_path)


@pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=pytest.mark.native)])
def test_logits_are_those_of_transformers_with_the_weights_that_it_means(written, kernels):
    quantized, meant = written
    model = load_model(quantized, "float32", CPU, select_kernels(kernels, CPU, torch.float32))
    assert (model.decoder.compiled is not None) == (kernels == "cpu")
    expected = transformers_logits(load_transformers(meant), random_prompt(60))
    assert expected.std() > 1
    torch.testing.assert_close(logits_of(model, 60), expected, atol=2e-4, rtol=1e-4)


def test_transformers_reads_the_same_weights_from_the_same_file(written):
    quantized, meant = written
    prompt = random_prompt(20)
    read = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float32, local_files_only=True, quantization_config=Mxfp4Config(dequantize=True)
    )
    expected = transformers_logits(load_transformers(meant), prompt)
    torch.testing.assert_close(transformers_logits(read, prompt), expected, atol=1e-4, rtol=1e-4)


def test_experts_stay_quantised_and_nothing_else_is(written):
    operations = Packing()
    load_model(written[0], "float32", CPU, Kernels(ReferenceBackend(), operations))
    held = [weight for weight in operations.packed if isinstance(weight, QuantizedWeight)]
    assert len(held) == 3 * 5 * 2  # layers, experts, maps
    assert {(weight.form, weight.group) for weight in held} == {(QuantForm.FP4, 32)}


def test_grouped_kernels_multiply_what_is_published_without_a_wait(written):
    triton = pytest.importorskip("kernels.triton.operations")
    quantized, meant = written
    kernels = Kernels(ReferenceBackend(), triton.TritonOperations())
    model = load_model(quantized, "float32", CPU, kernels)
    assert not model.decoder.waits_for_device
    expected = transformers_logits(load_transformers(meant), random_prompt(5))
    torch.testing.assert_close(logits_of(model, 5), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("part", ["gate_up_proj_blocks", "down_proj_scales"])
def test_a_misshapen_part_is_refused_by_name(written, part):
    quantized, name = written[0], f"{EXPERTS}.{part}"
    change_tensors(quantized, lambda tensors: tensors.update({name: tensors[name][:2].contiguous()}))
    module, _, kind = name.rpartition("_")
    with pytest.raises(CheckpointError, match=rf"^{module}.{kind}: .* has shape"):
        load_tiny(quantized)


def test_a_scale_that_is_no_number_is_refused(written):
    change_tensors(written[0], lambda tensors: tensors[f"{EXPERTS}.down_proj_scales"].view(-1)[3:4].fill_(255))
    with pytest.raises(CheckpointError, match=f"^{EXPERTS}.down_proj: scales: 255"):
        load_tiny(written[0])
