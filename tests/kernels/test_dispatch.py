"""The back-end is chosen by name or capability; the doctor's list says why."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import available_backends, select_kernels
from tandem.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_reference_runs_everywhere(name):
    assert select_kernels(name, CPU, torch.bfloat16).name == "reference"


def test_the_list_gives_each_backend_a_reason():
    backends = available_backends(CPU)
    assert [status.name for status in backends if status.usable] == ["reference"]
    assert all(status.reason for status in backends)


def test_an_unknown_name_is_a_bad_option_that_lists_the_known():
    with pytest.raises(ConfigError, match=r"--attention-backend: 'warp'.*auto, flash_attn, triton, .*reference"):
        select_kernels("warp", CPU, torch.float32)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_dtype_that_nothing_computes_is_a_bad_option(name):
    with pytest.raises(ConfigError, match="--attention-backend"):
        select_kernels(name, CPU, torch.int8)
