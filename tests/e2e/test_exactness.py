"""Families through real processes: the reference's tokens, whatever the settings.

Each way with each block size and each chunk budget, the families in turn; `python -m bench.exactness --families` runs
the whole grid.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.support.cluster import serve
from bench.support.exactness import ServedSystem, Settings, Workload, check_system, make_workload
from bench.support.logit_error import MAX_RATIO, MAX_RATIOS_OF_KV, measure_logit_errors
from bench.support.reference import Reference
from bench.support.tiny_models import TINY_MODELS, save_tiny_model
from bench.support.tiny_transformers import TINY_TRANSFORMERS
from tandem.client import Client
from tests.nixl_param import needs_nixl

MAX_TOKENS = 24
"""Prompts end on and beside the borders of blocks: few tokens cross them."""
MODELS = {tiny.name: tiny for tiny in (*TINY_TRANSFORMERS, *TINY_MODELS)}  # of one name, ours counts


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("model", "ways"),
    [
        ("llama-single-kv-head", [("shm", 16, 64), ("tcp", 1, 512)]),
        ("mistral-windowed", [("tcp", 64, 64), ("colocated", 16, 512)]),
        ("qwen2", [("shm", 64, 512), ("colocated", 1, 64)]),
        ("qwen3-biased", [("shm", 1, 64), ("colocated", 64, 512)]),
        ("gpt-oss", [("tcp", 16, 64)]),
    ],
)
def test_served_tokens_are_those_of_transformers(model: str, ways: list[tuple[str, int, int]], tmp_path: Path) -> None:
    folder = save_tiny_model(MODELS[model], tmp_path / model)
    longest = 600 if model == "gpt-oss" else 3000  # transformers takes 16 s for its experts, one by one
    work = make_workload(folder, Reference(folder), longest, seed=3, max_tokens=MAX_TOKENS)

    for way, block_size, chunk_tokens in ways:
        differing = check_system(way, folder, Settings(block_size, chunk_tokens), work)
        assert differing == [], (way, block_size, chunk_tokens)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("model", "ways"),
    [("gemma3_text", [("shm", 16, 64)]), ("qwen3_moe", [("tcp", 1, 512)])],
)
def test_what_transformers_computes_for_us_is_served_exactly(
    model: str, ways: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    folder = save_tiny_model(MODELS[model], tmp_path / model)
    work = make_workload(folder, Reference(folder), longest=200, seed=5, max_tokens=MAX_TOKENS)

    for way, block_size, chunk_tokens in ways:
        assert check_system(way, folder, Settings(block_size, chunk_tokens), work) == [], (way, block_size)


@needs_nixl
@pytest.mark.timeout(240)
def test_served_tokens_are_those_of_transformers_over_nixl_too(tmp_path: Path) -> None:
    folder = save_tiny_model(MODELS["qwen2"], tmp_path / "qwen2")
    work = make_workload(folder, Reference(folder), longest=200, seed=4, max_tokens=MAX_TOKENS)

    assert check_system("nixl", folder, Settings(16, 64), work) == []


@pytest.fixture(scope="module")
def long_enough(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Workload]:
    """A model, and prompts of more than any chunk budget below, with few tokens each."""
    folder = save_tiny_model(MODELS["qwen2"], tmp_path_factory.mktemp("models") / "qwen2")
    return folder, make_workload(folder, Reference(folder), longest=520, seed=6, max_tokens=6)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("transport", "block_size", "chunk_tokens"),
    [
        ("shm", 16, 64),
        ("tcp", 64, 64),
        pytest.param("nixl", 64, 512, marks=needs_nixl),
        pytest.param("nixl", 1, 64, marks=needs_nixl),
    ],
)
def test_served_tokens_are_the_same_with_random_delays(
    transport: str, block_size: int, chunk_tokens: int, long_enough: tuple[Path, Workload]
) -> None:
    folder, work = long_enough
    sizes = (
        "--block-size",
        str(block_size),
        "--chunk-tokens",
        str(chunk_tokens),
        "--kv-blocks",
        str(32768 // block_size),
    )
    with serve(str(folder), "--dtype", "float32", "--transport", transport, *sizes) as cluster:
        with Client(cluster.target) as client:
            client.wait_ready(timeout_s=60)
            workers = [worker.info.pid for worker in client.status().workers]
        with delayed(workers, seed=7):
            assert ServedSystem(cluster.target).generate(work.prompts, work.max_tokens) == list(work.expected)


@contextmanager
def delayed(pids: Sequence[int], seed: int) -> Iterator[None]:
    """One of these processes after the other stands still for a moment, wherever it is."""
    rng, over = random.Random(seed), threading.Event()

    def stop_and_go() -> None:
        while not over.wait(rng.uniform(0.002, 0.02)):
            pid = rng.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            over.wait(rng.uniform(0.002, 0.02))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("model", ["llama", "mistral-windowed", "qwen2", "qwen3", "gpt-oss", "apertus", "glm4_moe"])
def test_bfloat16_logits_lie_as_near_to_the_truth_as_those_of_transformers(model: str, tmp_path: Path) -> None:
    folder = save_tiny_model(MODELS[model], tmp_path / model)

    kv_dtypes = (None, *MAX_RATIOS_OF_KV)
    limits = (MAX_RATIO, *MAX_RATIOS_OF_KV.values())
    errors = measure_logit_errors(folder, 3, kv_dtypes)
    for kv_dtype, limit, error in zip(kv_dtypes, limits, errors, strict=True):
        assert error.ratio <= limit, kv_dtype
