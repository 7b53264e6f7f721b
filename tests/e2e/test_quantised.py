"""Quantised models through real processes: the tokens of the weights that they mean, disaggregated and colocated."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.support.cluster import serve
from bench.support.exactness import Settings, check_system, make_workload
from bench.support.reference import Reference
from bench.support.tiny_models import TINY_MODELS, TinyModel, save_tiny_model
from models.demo.text import make_story
from tandem.client import Client
from tests.gguf_files import Q4_0, Q8_0, write_gguf
from tests.quantized_checkpoints import gptq, write

WAYS = (("shm", 16), ("colocated", 64))
LLAMA = next(tiny for tiny in TINY_MODELS if tiny.name == "llama")
QWEN3 = TinyModel("qwen3", "qwen3", {"head_dim": 32})


def greedy(*options: str) -> list[tuple[int, ...]]:
    stories = [make_story(random.Random(seed), 4) for seed in range(2)]
    with serve("demo", "--quantize", "int8", *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=60)
        done = [client.complete(prompt=story.text, max_tokens=24, temperature=0.0) for story in stories]
    return [tuple(int(token_id) for token_id in each.choices[0].token_ids) for each in done]


@pytest.mark.timeout(240)
def test_a_model_rounded_to_int8_says_the_same_disaggregated_and_colocated() -> None:
    colocated = greedy("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "unlimited")

    assert all(colocated)
    assert greedy("--prefill", "1", "--decode", "1", "--transport", "tcp") == colocated


@pytest.mark.timeout(240)
def test_a_quantised_checkpoint_is_served_with_the_tokens_of_its_weights(tmp_path: Path) -> None:
    quantized, meant = write(gptq(4), save_tiny_model(LLAMA, tmp_path / "plain"), tmp_path)
    work = make_workload(meant, Reference(meant), longest=40, seed=5)

    for way, block_size in WAYS:
        assert check_system(way, quantized, Settings(block_size, 64), work) == [], way


@pytest.mark.timeout(240)
def test_a_gguf_file_is_served_with_the_tokens_of_its_weights(tmp_path: Path) -> None:
    file, meant = write_gguf(save_tiny_model(QWEN3, tmp_path / "plain"), tmp_path, (Q8_0, Q4_0))
    work = make_workload(meant, Reference(meant), longest=40, seed=6)

    assert check_system("tcp", file, Settings(16, 64), work) == []
