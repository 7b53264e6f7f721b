"""Served tokens when KV goes from GPU to GPU: real workers, whose pools lie in a stand-in for the CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.cluster import serve
from bench.support.exactness import ServedSystem, Workload, make_workload
from bench.support.reference import Reference
from bench.support.tiny_models import TINY_MODELS, save_tiny_model
from tests.standins.build import built

DELAY_US = "3000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(model for model in TINY_MODELS if model.name == "llama-single-kv-head")
    return save_tiny_model(tiny, tmp_path_factory.mktemp("models") / tiny.name)


@pytest.fixture(scope="module")
def work(folder: Path) -> Workload:
    return make_workload(folder, Reference(folder), longest=500, seed=5, max_tokens=8)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_tokens_are_those_of_transformers(
    transport: str, folder: Path, work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("libcuda", "libnccl"):
        built(library)
    monkeypatch.setenv("STANDIN_CUDA_DELAY_US", DELAY_US)  # where it is set, pools lie on the stand-in's GPU
    monkeypatch.setenv("STANDIN_NCCL_DELAY_US", DELAY_US)
    small = ("--dtype", "float32", "--chunk-tokens", "64", "--kv-blocks", "2048", "--local-prefill-tokens", "0")

    with serve(str(folder), "--prefill", "1", "--decode", "1", "--transport", transport, *small) as cluster:
        system = ServedSystem(cluster.target)
        for first in range(0, len(work.prompts), 8):
            some = slice(first, first + 8)
            assert system.generate(work.prompts[some], work.max_tokens) == list(work.expected[some])
    assert any(f"kv transport chosen transport={transport} " in line for line in cluster.log)
