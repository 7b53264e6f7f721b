"""A clock before every kernel changes nothing but tells where the time goes."""

from __future__ import annotations

import torch

from bench.step_profile import Clock, _Timed
from kernels.dispatch import select_kernels


def test_each_kernel_is_on_the_clock_by_its_name_and_shape():
    operations = select_kernels("reference", torch.device("cpu"), torch.float32).operations
    clock = Clock()
    timed = _Timed(operations, clock)
    x, weight = torch.randn(2, 8), torch.randn(6, 8)
    assert torch.equal(timed.linear(weight, None)(x), operations.linear(weight, None)(x))
    assert torch.equal(timed.rms_norm(x, x[0], 1e-6), operations.rms_norm(x, x[0], 1e-6))
    assert timed.name == "reference"
    spent = clock.take()
    assert set(spent) == {"linear 6×8", "rms_norm"}
    assert all(seconds > 0 for seconds in spent.values())
    assert clock.take() == {}
