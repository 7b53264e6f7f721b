"""The back-end is chosen by name or capability; the doctor's list says why."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.tiers import machine_tiers
from kernels.dispatch import available_backends, held_forms, select_kernels, taken_kv
from kernels.quantized import QuantForm
from tandem.errors import ConfigError
from tests.kernels.tiers import TIERS

CPU = torch.device("cpu")


@pytest.mark.native
def test_auto_takes_the_native_kernels_on_a_cpu():
    kernels = select_kernels("auto", CPU, torch.bfloat16)
    assert kernels.name == "cpu"
    assert kernels.operations.name == f"cpu-{library.best_tier()}"


def test_auto_takes_the_reference_where_the_native_kernels_were_not_built(no_library, caplog):
    assert select_kernels("auto", CPU, torch.bfloat16).name == "reference"
    with pytest.raises(ConfigError, match=r"cpu cannot run on cpu: it is not compiled: no C\+\+ compiler"):
        select_kernels("cpu", CPU, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_reference_computes_every_float(dtype):
    assert select_kernels("reference", CPU, dtype).name == "reference"


def test_auto_takes_the_reference_for_what_only_it_computes():
    assert select_kernels("auto", CPU, torch.float64).name == "reference"


@pytest.mark.native
def test_the_list_gives_each_backend_a_reason():
    backends = available_backends(CPU)
    assert [status.name for status in backends if status.usable] == ["cpu", "reference"]
    assert f"tier {library.best_tier()} of {', '.join(machine_tiers())}" in backends[2].reason
    assert all(status.reason for status in backends)


def test_the_kernels_say_why_they_and_no_better_ones_were_chosen():
    decision = select_kernels("auto", CPU, torch.float64).decision
    assert decision is not None
    assert (decision.value, decision.force) == ("reference", "--attention-backend")
    assert "triton: " in decision.why
    forced = select_kernels("reference", CPU, torch.float32).decision
    assert forced is not None
    assert forced.why == "--attention-backend says so"


def test_an_unknown_name_is_a_bad_option_that_lists_the_known():
    with pytest.raises(ConfigError, match=r"--attention-backend: 'warp'.*auto, flash_attn, triton, cpu, reference"):
        select_kernels("warp", CPU, torch.float32)


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_a_dtype_that_nothing_computes_is_a_bad_option(name):
    with pytest.raises(ConfigError, match="--attention-backend"):
        select_kernels(name, CPU, torch.int8)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_tier_can_be_forced(name):
    for tier in TIERS:
        assert select_kernels(name, CPU, torch.bfloat16, tier).operations.name == f"cpu-{tier}"


@pytest.mark.parametrize(
    ("name", "device", "tier", "message"),
    [
        ("auto", "cpu", "avx9", "avx9 cannot run on cpu: this machine runs baseline"),
        ("reference", "cpu", "baseline", "baseline is a tier of the kernels cpu, not of reference"),
        ("auto", "cuda", "baseline", "baseline cannot run on cuda: native code for the CPU only"),
    ],
)
@pytest.mark.native
def test_a_tier_that_cannot_run_is_refused_by_name(name, device, tier, message):
    with pytest.raises(ConfigError, match=f"--cpu-tier: {message}"):
        select_kernels(name, torch.device(device), torch.bfloat16, tier)


def test_no_tier_can_be_forced_where_there_is_no_library(no_library):
    with pytest.raises(ConfigError, match="--cpu-tier: baseline cannot run on cpu: it is not compiled"):
        select_kernels("auto", CPU, torch.bfloat16, "baseline")


def test_a_set_says_which_pools_it_stores_to():
    found = taken_kv(CPU, torch.bfloat16)
    assert {"reference", "cpu"} & set(found)
    assert set(found.values()) == {(torch.bfloat16, torch.int8, torch.float8_e4m3fn)}


def test_a_set_says_which_quantised_weights_it_holds():
    held = held_forms(torch.device("cpu"), torch.bfloat16)
    assert held["reference"] == dict.fromkeys(QuantForm, ())
    for forms in (held[name] for name in held if name != "reference"):
        assert all({0, 32, 128} <= set(groups) for groups in forms.values())
