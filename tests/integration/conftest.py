"""Workers that follow the protocol but compute nothing, and a checkpoint without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.types import TokenId
from tests import fake_model
from tests.byte_tokenizer import make_byte_tokenizer
from tests.fake_worker import FakeWorker

EOS = TokenId(256)
VOCAB_SIZE = 260
CONTEXT_TOKENS = 512


@pytest.fixture
def fake_worker() -> type[FakeWorker]:
    """Makes a worker: `fake_worker(info, peers)`."""
    return FakeWorker


@pytest.fixture
def token_at() -> Callable[..., TokenId]:
    """The fake model."""
    return fake_model.token_at


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: a byte-level tokenizer, and one special token that ends a text."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tokenizer = make_byte_tokenizer()
    assert tokenizer.token_to_id("<eos>") == EOS
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_TOKENS}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (path / "config.json").write_text(json.dumps(config | sizes | {"eos_token_id": EOS}))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))
    return path
