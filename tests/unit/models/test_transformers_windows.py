"""Windows of models that transformers computes: as in its own `generate`, or refused before a weight is read."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from bench.support.tiny_models import TinyModel
from bench.support.tiny_transformers import TINY_TRANSFORMERS
from kernels.dispatch import select_kernels
from models.loading import load_model
from models.preflight import TRANSFORMERS, read_servable
from models.transformers_families import FAMILIES, MIXED_WINDOWS, WINDOWED
from models.transformers_masks import Mask, UnsupportedModel
from tandem.errors import CheckpointError
from tests.paged_driver import PagedDriver, edited, load_transformers, random_prompt, reference_tokens

CPU = torch.device("cpu")
WINDOW = 23
MIXED = ["sliding_attention", "full_attention"]
BY_NAME = {tiny.name: tiny for tiny in TINY_TRANSFORMERS}


def windowed(tiny, layer_types):
    keys = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}
    keys |= {"layer_types": layer_types * (tiny.config().num_hidden_layers // 2)} if layer_types else {}
    return TinyModel(tiny.name, tiny.family, dict(tiny.overrides) | keys)


def load(folder):
    return load_model(folder, "float32", CPU, select_kernels("auto", CPU, torch.float32), None, TRANSFORMERS)


def test_families_with_windows_are_those_whose_config_has_one():
    assert {name for name in FAMILIES if hasattr(AutoConfig.for_model(name), "sliding_window")} == WINDOWED
    assert MIXED_WINDOWS < WINDOWED


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_tokens_of_a_window_shorter_than_the_text_are_those_of_transformers(checkpoint, name):
    folder = checkpoint(windowed(BY_NAME[name], MIXED if name in MIXED_WINDOWS else None))
    reference, model = load_transformers(folder), load(folder)
    assert WINDOW in {each.sliding_window for each in model.decoder.paged.params.values()}
    prompts = [random_prompt(length) for length in (1, 17, 70)]
    expected = [reference_tokens(reference, prompt, 24) for prompt in prompts]
    with torch.inference_mode():
        assert PagedDriver(model, 16, 100).generate(prompts, 24, 64) == expected


def refused(folder, words):
    with pytest.raises(CheckpointError, match=words):
        read_servable(str(folder), TRANSFORMERS)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


@pytest.mark.parametrize("name", sorted(FAMILIES - WINDOWED))
def test_a_window_of_a_family_that_computes_none_is_refused(checkpoint, tmp_path, name):
    """transformers would cut its cache to the window, and its mask not."""
    refused(edited(checkpoint(BY_NAME[name]), tmp_path, sliding_window=WINDOW), f"sliding_window: {name} has none")


@pytest.mark.parametrize("name", sorted(FAMILIES - MIXED_WINDOWS))
def test_layers_of_two_kinds_of_a_family_that_has_one_are_refused(checkpoint, tmp_path, name):
    refused(edited(checkpoint(BY_NAME[name]), tmp_path, layer_types=MIXED), f"layer_types: {name} ")


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("phi", {"attention_chunk_size": 16}, "attention_chunk_size: phi has none"),
        ("cohere2", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types: 'chunked_attention'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: only causal"),
        ("phimoe", {"is_causal": False}, "is_causal: only causal"),
    ],
)
def test_attention_that_is_neither_causal_nor_windowed_is_refused(checkpoint, tmp_path, name, keys, words):
    refused(edited(checkpoint(BY_NAME[name]), tmp_path, **keys), words)


@pytest.mark.parametrize("window", [1, 2, 23, 4096])
def test_a_mask_says_its_window(window):
    mask = Mask(sliding_window_causal_mask_function(window))
    assert mask.window(None) == mask.window(window) == window


def test_a_mask_without_a_window_has_none():
    assert Mask(causal_mask_function).window(None) is None


@pytest.mark.parametrize(
    ("sees", "asked", "words"),
    [
        (sliding_window_causal_mask_function(7), 8, "a window of 8 where its mask has one of 7"),
        (causal_mask_function, 8, "a window of 8 where its mask has none"),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), None, "neither causal nor a window"),
        (or_masks(causal_mask_function, lambda *_: torch.tensor(True)), None, "neither causal nor a window"),
        (lambda _b, _h, q, kv: abs(q - kv) < 8, None, "neither causal nor a window"),
        (lambda _b, _h, q, kv: kv > q, None, "neither causal nor a window"),
    ],
)
def test_a_mask_that_our_attention_does_not_compute_is_refused(sees, asked, words):
    with pytest.raises(UnsupportedModel, match=words):
        Mask(sees).window(asked)
