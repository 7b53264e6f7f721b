"""Served tokens when KV goes from GPU to GPU: real workers, whose pools lie in a stand-in for the CUDA driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.cluster import serve
from bench.exactness import MAX_TOKENS, make_workload
from bench.exactness_reference import Reference
from bench.exactness_served import ServedSystem
from bench.tiny_models import TINY_MODELS, save_tiny_model
from tests.standins import cuda
from tests.standins.build import built

SITE = Path(cuda.__file__).parent / "site"
ROOT = Path(cuda.__file__).parents[2]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_over_cuda_ipc_are_those_of_transformers(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("libcuda")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT)]))
    monkeypatch.setenv("STANDIN_CUDA_DELAY_US", "3000")
    tiny = next(model for model in TINY_MODELS if model.name == "llama-single-kv-head")
    folder = save_tiny_model(tiny, tmp_path / tiny.name)
    work = make_workload(folder, Reference(folder), longest=500, seed=5)
    options = ["--dtype", "float32", "--chunk-tokens", "64", "--kv-blocks", "2048", "--local-prefill-tokens", "0"]
    options += [] if overlap else ["--no-overlap"]

    with serve(str(folder), "--prefill", "1", "--decode", "1", "--transport", "cuda_ipc", *options) as cluster:
        system = ServedSystem(cluster.target)
        for first in range(0, len(work.prompts), 8):
            some = slice(first, first + 8)
            assert system.generate(work.prompts[some], MAX_TOKENS) == list(work.expected[some])
    assert any("kv goes over cuda_ipc" in line for line in cluster.log)
