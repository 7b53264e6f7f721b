"""The tokenizer's files that gateways ask for, of a GGUF file that has its own."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

from tokenizers import Tokenizer

from models.files.checkpoint import read_checkpoint, resolve_model
from models.files.tokenizer_file import read_tokenizer
from router.faces.vllm.servicer import _archive
from tests.gguf_files import F32, tokenizer_metadata, write_gguf


def test_a_file_is_told_as_the_files_that_say_the_same(tmp_path: Path) -> None:
    demo = read_tokenizer(resolve_model("demo"))
    metadata = tokenizer_metadata(demo, "gpt2", pre="gpt-2", eos_token_id=1)
    file, _ = write_gguf(resolve_model("demo"), tmp_path, (F32,), **metadata, **{"tokenizer.chat_template": "hello"})
    (file.parent / "tokenizer.json").unlink()

    archive = _archive(read_checkpoint(str(file)))

    assert archive == _archive(read_checkpoint(str(file)))
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        told = {name: files.read(name).decode() for name in files.namelist()}
    assert sorted(told) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert Tokenizer.from_str(told["tokenizer.json"]).encode("Once upon").ids == demo.encode("Once upon").ids
    settings = json.loads(told["tokenizer_config.json"])
    assert settings == {"eos_token": "<|end|>", "chat_template": [{"name": "default", "template": "hello"}]}
    assert json.loads(told["config.json"])["vocab_size"] == demo.get_vocab_size()
