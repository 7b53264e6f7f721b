"""GGUF files compute what their blocks mean, or are refused by name."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.support.tiny_models import TinyModel
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.config import load_model_config
from models.files.checkpoint import read_checkpoint
from models.files.gguf import find_gguf
from models.gguf_blocks import BLOCKS
from models.loading import load_model
from models.rope_config import Llama3Scaling
from tandem.errors import CheckpointError, ConfigError
from tandem.kv_layout import DType
from tests.gguf_files import BF16, F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, container, gguf_name, metadata_of, write_gguf
from tests.paged_driver import (
    load_tiny,
    load_transformers,
    logits_of,
    random_prompt,
    transformers_logits,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "gguf_blocks.json"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = TinyModel("llama-wide", "llama", WIDE | {"head_dim": 64})
QWEN2 = TinyModel("qwen2-wide", "qwen2", WIDE | {"tie_word_embeddings": True})
QWEN3 = TinyModel("qwen3-wide", "qwen3", WIDE | {"head_dim": 64})

GEMMA3 = TinyModel(
    "gemma3-wide",
    "gemma3_text",
    WIDE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16, "num_hidden_layers": 6},
)


@pytest.fixture
def written(checkpoint, tmp_path):
    return lambda tiny, *kinds, **metadata: write_gguf(checkpoint(tiny), tmp_path, kinds, **metadata)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: BLOCKS[kind].name)
def test_blocks_mean_what_the_package_gguf_says(kind):
    """The golden file holds random blocks and what gguf 0.19 made of them."""
    golden = json.loads(GOLDEN.read_text())[str(kind)]
    blocks = torch.from_numpy(np.frombuffer(base64.b64decode(golden["blocks"]), np.uint8).copy())
    expected = torch.from_numpy(np.frombuffer(base64.b64decode(golden["weights"]), "<f4").copy())
    weight = BLOCKS[kind].decode(blocks.view(2, 1, BLOCKS[kind].num_bytes), torch.float32)
    assert torch.equal(weight.dequantize().flatten(), expected)


@pytest.mark.parametrize(
    ("tiny", "kinds"),
    [
        (LLAMA, (Q8_0,)),
        (LLAMA, (Q4_K, Q6_K, Q4_0)),
        (LLAMA, (F16, BF16, F32)),
        (QWEN2, (Q4_K, Q6_K)),
        (QWEN3, (Q4_0, Q8_0)),
        (GEMMA3, (Q8_0, Q4_0)),
    ],
    ids=str,
)
def test_a_gguf_file_computes_what_transformers_does_with_the_weights_that_it_means(written, tiny, kinds):
    file, meant = written(tiny, *kinds)
    ours = logits_of(load_tiny(file, "float32"))
    theirs = transformers_logits(load_transformers(meant), random_prompt(40))
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_the_file_stands_for_a_config_that_the_router_reads_too(written, checkpoint):
    file, _ = written(LLAMA, Q8_0)
    plain = load_model_config(checkpoint(LLAMA))
    config = load_model_config(file)
    assert config.dtype is DType.BFLOAT16
    assert {name: getattr(config, name) for name in ("num_heads", "head_dim", "vocab_size", "rope", "tied")} == {
        name: getattr(plain, name) for name in ("num_heads", "head_dim", "vocab_size", "rope", "tied")
    }
    info = read_checkpoint(str(file))
    assert (info.family, info.vocab_size, info.path, info.texts) == ("llama", plain.vocab_size, file, file.parent)
    assert read_checkpoint(str(file.parent)).config_fingerprint == info.config_fingerprint


def test_without_a_tokenizer_beside_it_the_file_is_asked_and_fingerprinted(written):
    file, _ = written(LLAMA, Q8_0)
    (file.parent / "tokenizer.json").unlink()
    alone = read_checkpoint(str(file))
    assert alone.texts == file
    file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.Tokens"))
    assert read_checkpoint(str(file)).config_fingerprint != alone.config_fingerprint


def test_a_text_ends_with_each_token_that_ends_one_or_a_turn(written):
    ends = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 3}
    file, _ = written(GEMMA3, Q8_0, **ends)
    assert read_checkpoint(str(file)).eos_token_ids == {1, 3}
    Tokenizer(WordLevel({"a": 0, "<end_of_turn>": 5}, unk_token="a")).save(str(file.parent / "tokenizer.json"))
    assert read_checkpoint(str(file)).eos_token_ids == {1, 3, 5}


def test_a_folder_of_several_files_is_refused_with_the_remedy(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one of them, such as a\.gguf"):
        find_gguf(tmp_path)


def test_scaling_of_llama_3_is_known_by_its_frequencies(checkpoint, tmp_path):
    config = json.loads((checkpoint(LLAMA) / "config.json").read_text())
    theta, half = config["rope_parameters"]["rope_theta"], config["head_dim"] // 2
    wavelengths = 2 * np.pi * theta ** (np.arange(half) / half)
    smooth = (8192 / wavelengths - 1) / 3
    divisors = np.where(
        wavelengths < 2048, 1.0, np.where(wavelengths > 8192, 8.0, 1 / ((1 - smooth) / 8 + smooth))
    ).astype(np.float32)
    embedding = ((320, 256), F32, bytes(320 * 256 * 4))
    for content, is_good in ((divisors, True), (divisors[::-1].copy(), False)):
        tensors = {"token_embd.weight": embedding, "rope_freqs.weight": ((half,), F32, content.tobytes())}
        file = tmp_path / f"{is_good}.gguf"
        file.write_bytes(container(metadata_of(config), tensors))
        if is_good:
            assert load_model_config(file).rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
        else:
            with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: is not Llama 3's"):
                load_model_config(file)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "falcon"}, r"general\.architecture: 'falcon' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type: 'yarn' is not read"),
        ({"llama.attention.head_count": "four"}, r"llama\.attention\.head_count: is 'four'"),
        ({"llama.attention.head_count_kv": [1.0]}, r"llama\.attention\.head_count_kv: is \[1\.0\], not a number"),
        ({"llama.rope.dimension_count": 32}, r"llama\.rope\.dimension_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window: llama has none"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused_by_key(written, metadata, named):
    file, _ = written(LLAMA, Q8_0, **metadata)
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{named}|tiny\.gguf: {named}"):
        load_model_config(file)


@pytest.mark.parametrize("kept", [3, 40, 2000, -1])
def test_a_file_that_ends_early_is_refused_by_name(written, kept):
    file, _ = written(LLAMA, Q8_0)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        load_tiny(file)


def test_tensors_are_exactly_those_of_the_model(checkpoint, tmp_path):
    config = json.loads((checkpoint(LLAMA) / "config.json").read_text())
    plain = load_file(checkpoint(LLAMA) / "model.safetensors")
    tensors = {gguf_name(name): (tuple(each.shape), F32, each.numpy().tobytes()) for name, each in plain.items()}

    def load(changed):
        file = tmp_path / "changed.gguf"
        file.write_bytes(container(metadata_of(config), changed))
        return load_tiny(file)

    load(tensors)
    name = "blk.1.ffn_up.weight"
    with pytest.raises(CheckpointError, match=rf"^{name}: tensor is missing"):
        load({each: tensor for each, tensor in tensors.items() if each != name})
    with pytest.raises(CheckpointError, match=r"^extra\.weight: .* does not belong"):
        load(tensors | {"extra.weight": ((1,), F32, bytes(4))})
    with pytest.raises(CheckpointError, match=rf"^{name}: .* has shape \[4, 4\], not \[512, 256\]"):
        load(tensors | {name: ((4, 4), F32, bytes(64))})
    with pytest.raises(CheckpointError, match=rf"^{name}: .* type number 10; F32"):
        load(tensors | {name: ((512, 256), 10, bytes(64))})


def test_a_quantised_file_is_not_rounded_again(written):
    file, _ = written(LLAMA, Q8_0)
    kernels = Kernels(ReferenceBackend(), ReferenceOperations())
    with pytest.raises(ConfigError, match=r"--quantize.*already \(gguf Q8_0\)"):
        load_model(file, None, torch.device("cpu"), kernels, QuantForm.INT8)
