"""For every test: one compute thread, Triton's interpreter where there is no GPU, and no example that is too slow."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Tensors are tiny and tests share the cores: a second thread only spins. Before torch loads; processes that tests start
# inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from kernels.cpu.library import obstacle

if TYPE_CHECKING:
    from tests.forked_commands import Forking

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when anything imports triton: transformers does

# What an example takes is the machine's affair: a busy one stands still for longer than Hypothesis allows.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "long", settings.get_profile("tandem"), max_examples=6000
)  # `pytest --hypothesis-profile long`
settings.load_profile("tandem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without native kernels, Tandem works on torch alone, and their tests say why they do not run."""
    native = [item for item in items if item.get_closest_marker("native")]
    if native and not os.environ.get("REQUIRE_PROGRAMS") and (reason := obstacle()) is not None:
        for item in native:
            item.add_marker(pytest.mark.skip(reason=f"native CPU kernels: {reason}"))


def pytest_collection_finish() -> None:
    """What was imported until now lives to the end: a collection, of which some tests make many, need not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fork_command() -> Iterator[Forking]:
    """In place of `bench.support.cluster.open_command`: what it starts is forked, and nothing is imported once more."""
    from tests.forked_commands import forking  # it imports all of `tandem`, which few tests need

    with forking() as fork:
        yield fork
