from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from models.files.checkpoint import DEMO, read_checkpoint, resolve_model
from tandem.errors import CheckpointError


def test_a_checkpoint_is_described(write_checkpoint: Callable[..., Path]) -> None:
    info = read_checkpoint(str(write_checkpoint(generation={"temperature": 0.6, "top_k": 20, "do_sample": True})))

    assert (info.name, info.family, info.vocab_size, info.context_tokens) == ("tiny", "llama", 100, 64)
    assert info.eos_token_ids == {2}
    assert info.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert len(info.config_fingerprint) == 32


def test_a_model_has_the_name_that_it_was_given(write_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(write_checkpoint(), target_is_directory=True)
    info = read_checkpoint(f"{tmp_path}/current/")
    assert info.name == "current"
    served = info.called(("big", "small"))
    assert served.name == "big"
    assert [name for name in ("", "big", "small", "current") if served.answers_to(name)] == ["", "big", "small"]
    assert info.called(()) == info


def test_the_demo_model_lies_beside_the_source() -> None:
    assert resolve_model(DEMO).parts[-3:] == ("models", "demo", "checkpoint")


def test_generation_config_decides_what_ends_a_text(write_checkpoint: Callable[..., Path]) -> None:
    assert read_checkpoint(str(write_checkpoint(generation={"eos_token_id": [5, 7]}))).eos_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("file", "told", "ends"),
    [
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, {5, 9}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|im_end|>", "special": True}}, {5, 9}),
        ("tokenizer_config.json", {"eos_token": "<e>", "added_tokens_decoder": {"10": {"content": "<e>"}}}, {5, 10}),
        ("tokenizer_config.json", {"eos_token": "<e>", "added_tokens_decoder": {"100": {"content": "<e>"}}}, {5}),
        ("tokenizer_config.json", {"eos_token": "nowhere"}, {5}),
        ("tokenizer_config.json", {"eos_token": ["<|im_end|>"]}, {5}),
        ("special_tokens_map.json", {"eos_token": "<|im_end|>"}, {5, 9}),
    ],
)
def test_what_the_tokenizer_calls_its_end_ends_a_text_too(
    write_checkpoint: Callable[..., Path], file: str, told: dict[str, Any], ends: set[int]
) -> None:
    folder = write_checkpoint(generation={"eos_token_id": 5})
    Tokenizer(WordLevel({"a": 0, "<|im_end|>": 9}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / file).write_text(json.dumps(told))
    assert read_checkpoint(str(folder)).eos_token_ids == ends


def test_a_model_without_end_of_text_is_served(write_checkpoint: Callable[..., Path]) -> None:
    assert read_checkpoint(str(write_checkpoint({"eos_token_id": None}))).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"min_p": None, "num_beams": 4}, {}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)
def test_only_an_explicit_no_makes_a_model_greedy(
    write_checkpoint: Callable[..., Path], generation: dict[str, Any], defaults: dict[str, float]
) -> None:
    assert read_checkpoint(str(write_checkpoint(generation=generation))).generation_defaults == defaults


@pytest.mark.parametrize(
    ("rope", "context_tokens"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (None, 64),
    ],
)
def test_the_context_follows_rope_scaling(
    write_checkpoint: Callable[..., Path], rope: dict[str, Any] | None, context_tokens: int
) -> None:
    assert read_checkpoint(str(write_checkpoint({"rope_scaling": rope}))).context_tokens == context_tokens


@pytest.mark.parametrize(
    ("config", "generation", "named"),
    [
        ({"vocab_size": "many"}, None, "config.json: vocab_size"),
        ({"vocab_size": True}, None, "config.json: vocab_size"),
        ({"max_position_embeddings": 0}, None, "config.json: max_position_embeddings"),
        ({"model_type": 7}, None, "config.json: model_type"),
        ({"eos_token_id": "</s>"}, None, "config.json: eos_token_id"),
        ({"eos_token_id": 100}, None, "config.json: eos_token_id"),
        ({}, {"temperature": "hot"}, "generation_config.json: temperature"),
        ({}, {"top_p": float("nan")}, "generation_config.json: top_p"),
        ({}, {"top_k": -2}, "generation_config.json: top_k"),
        ({}, {"top_k": 1.5}, "generation_config.json: top_k"),
    ],
)
def test_a_bad_value_names_file_and_key(
    write_checkpoint: Callable[..., Path], config: dict[str, Any], generation: dict[str, Any] | None, named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_checkpoint(str(write_checkpoint(config, generation)))


def test_a_missing_folder_and_a_missing_or_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        read_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: is not a JSON object"):
        read_checkpoint(str(tmp_path))


def test_the_fingerprint_follows_every_file_that_router_and_worker_must_share(
    write_checkpoint: Callable[..., Path],
) -> None:
    folder = write_checkpoint()
    seen = {read_checkpoint(str(folder)).config_fingerprint}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
        seen.add(read_checkpoint(str(folder)).config_fingerprint)

    assert len(seen) == 5
    assert read_checkpoint(str(folder)).config_fingerprint in seen
