"""`--activations`: rounded where the checkpoint was made so or the option says so, and where the kernels can."""

from __future__ import annotations

import pytest
import torch

from bench.support.tiny_models import TinyModel
from kernels.operations import Kernels
from kernels.quantized import QuantForm, QuantizedWeight
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.files.checkpoint import resolve_model
from models.loading import load_model
from tandem.errors import ConfigError
from tests.paged_driver import REFERENCE, PagedDriver, PagedSeq, random_prompt
from tests.quantized_checkpoints import FORMS, write

pytest.importorskip("triton")

from kernels.triton.operations import TritonOperations
from kernels.triton.quantized import HeldWeight, QuantizedLinear
from kernels.triton.rounding import RoundingLinear, can_round

CPU = torch.device("cpu")
TINY = TinyModel("llama", "llama")
TRITON = Kernels(ReferenceBackend(), TritonOperations())
MADE_SO = next(form for form in FORMS if form.name.startswith("float-quantized-8-channel"))


def load(folder, activations, form=None, kernels=TRITON):
    return load_model(folder, "bfloat16", CPU, kernels, form, activations=activations)


def is_rounded(model):
    return isinstance(model.decoder.layers[0].attention.output, RoundingLinear)


@pytest.mark.parametrize(("activations", "expected"), [("auto", True), ("plain", False), ("fp8", True)])
def test_a_checkpoint_made_for_it_has_its_activations_rounded(checkpoint, tmp_path, activations, expected):
    quantized, _ = write(MADE_SO, checkpoint(TINY), tmp_path)
    assert is_rounded(load(quantized, activations)) == expected


@pytest.mark.parametrize(("activations", "expected"), [("auto", False), ("fp8", True)])
def test_a_plain_one_rounded_to_fp8_has_it_where_the_option_says_so(checkpoint, activations, expected):
    assert is_rounded(load(checkpoint(TINY), activations, QuantForm.FP8)) == expected


class Rounding(ReferenceOperations):
    """The reference, which rounds what `--activations fp8` would on a GPU."""

    def rounding(self, device):
        return self

    def rounds(self, weight):
        return can_round(weight)

    def linear(self, weight, bias):
        if isinstance(weight, QuantizedWeight) and self.rounds(weight):
            return RoundingLinear(QuantizedLinear(HeldWeight.of(weight), bias))
        return super().linear(weight, bias)


def test_logits_err_two_to_three_times_as_much_as_those_of_bfloat16():
    prompt = random_prompt(300)
    truth, plain, rounded = (
        PagedDriver(
            load_model(resolve_model("demo"), dtype, CPU, kernels, QuantForm.FP8, activations=activations), 16, 20
        )
        .step([(PagedSeq(prompt), len(prompt))])
        .double()
        for dtype, kernels, activations in (
            ("float32", REFERENCE, "plain"),
            ("bfloat16", REFERENCE, "plain"),
            ("bfloat16", Kernels(ReferenceBackend(), Rounding()), "fp8"),
        )
    )
    errors = [(logits - truth).pow(2).mean(1).sqrt().median() for logits in (plain, rounded)]
    assert 1.5 < errors[1] / errors[0] < 3


def test_models_that_round_have_a_fingerprint_of_their_own(checkpoint):
    fingerprints = [load(checkpoint(TINY), each, QuantForm.FP8).fingerprint for each in ("plain", "auto", "fp8")]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert load(checkpoint(TINY), "fp8").fingerprint == load(checkpoint(TINY), "plain").fingerprint


def test_kernels_without_such_products_refuse_it_by_name_or_leave_it_be(checkpoint, tmp_path):
    quantized, _ = write(MADE_SO, checkpoint(TINY), tmp_path)
    load(quantized, "auto", kernels=REFERENCE)
    with pytest.raises(ConfigError, match=r"--activations: reference multiplies no fp8 on cpu"):
        load(quantized, "fp8", kernels=REFERENCE)


def test_transformers_own_code_refuses_it_by_name(checkpoint):
    with pytest.raises(ConfigError, match=r"--activations: fp8 is for families computed natively"):
        load_model(checkpoint(TINY), "bfloat16", CPU, TRITON, implementation="transformers", activations="fp8")
