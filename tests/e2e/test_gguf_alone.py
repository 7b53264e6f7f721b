"""A GGUF file without a tokenizer beside it: served with its own, it gives what its folder gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, normalizers, trainers
from tokenizers.models import BPE

from bench.support.cluster import serve
from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from models.files.checkpoint import resolve_model
from tandem.client import Client
from tests.gguf_files import BYTES, F32, tokenizer_metadata, write_gguf

PROMPT = "Once upon a time, Ida gave "
LLAMA = next(tiny for tiny in TINY_MODELS if tiny.name == "llama")


def answers(model: Path) -> list[tuple[int, tuple[int, ...], str]]:
    """Prompt tokens, tokens and text of a prompt, of a constrained one and, if there is a template, of a chat."""
    with serve(str(model), "--prefill", "1", "--decode", "1") as cluster, Client(cluster.target) as client:
        asked = [{"prompt": PROMPT}, {"prompt": PROMPT, "regex": "[a-f]{4}"}]
        if client.model().has_chat_template:
            asked.append({"messages": [{"role": "user", "content": PROMPT}]})
        done = [client.complete(**each, max_tokens=8, temperature=0.0) for each in asked]
    return [(each.usage.prompt_tokens, tuple(each.choices[0].token_ids), each.choices[0].text) for each in done]


def alone(file: Path, folder: Path) -> Path:
    """The file in a folder of its own."""
    folder.mkdir()
    return Path(shutil.copy(file, folder))


@pytest.mark.timeout(240)
def test_the_demo_model_in_one_file_answers_as_from_its_folder(tmp_path: Path) -> None:
    demo = resolve_model("demo")
    tokenizer, settings = Tokenizer.from_file(str(demo / "tokenizer.json")), demo / "tokenizer_config.json"
    template = json.loads(settings.read_text())["chat_template"]
    metadata = tokenizer_metadata(tokenizer, "gpt2", pre="gpt-2", eos_token_id=1, padding_token_id=0)
    file, _ = write_gguf(demo, tmp_path, (F32,), **metadata, **{"tokenizer.chat_template": template})
    shutil.copy(settings, file.parent)

    from_folder = answers(file)
    assert len(from_folder) == 3
    assert answers(alone(file, tmp_path / "alone")) == from_folder


@pytest.mark.timeout(240)
def test_a_tokenizer_by_scores_answers_as_from_its_folder(tmp_path: Path) -> None:
    trained = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    trained.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *sorted(BYTES)]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, limit_alphabet=40, special_tokens=special)
    trained.train_from_iterator([PROMPT] * 9, trainer)
    scores = [-float(index) for index in range(trained.get_vocab_size())]
    source = Tokenizer.from_str(trained.to_str())
    metadata = tokenizer_metadata(source, "llama", scores=scores, bos_token_id=1, eos_token_id=2, add_bos_token=False)
    file, _ = write_gguf(save_tiny_model(LLAMA, tmp_path / "plain"), tmp_path, (F32,), **metadata)
    source.save(str(file.parent / "tokenizer.json"))

    assert answers(alone(file, tmp_path / "alone")) == answers(file)
