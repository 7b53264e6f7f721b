"""From a checkpoint folder to a decoder that transformers runs with our parts (`models.transformers_decoder`).

`models.preflight` has passed its config. transformers reads the weights, from safetensors alone;
no code of a checkpoint is ever run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kernels.operations import Kernels, LinearMap
from kernels.quantized import QuantForm, QuantizedWeight, quantize
from models.config import ModelShape
from models.dtypes import torch_dtype
from models.files.checkpoint import read_checkpoint
from models.transformers_decoder import IMPLEMENTATION, TransformersDecoder, build
from models.transformers_masks import UnsupportedModel
from tandem.errors import CheckpointError
from tandem.kv_layout import DType


def load_decoder(
    path: Path, dtype: DType, device: torch.device, kernels: Kernels, form: QuantForm | None
) -> tuple[TransformersDecoder, ModelShape]:
    """Loads the folder `path` for activations of `dtype`; linear maps are rounded to `form`.

    Raises CheckpointError that names what is not supported.
    """
    config = _read_config(path)
    causal_lm: Any = AutoModelForCausalLM
    try:
        model, report = causal_lm.from_pretrained(
            path,
            config=config,
            dtype=torch_dtype(dtype),
            attn_implementation=IMPLEMENTATION,
            experts_implementation=IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: transformers cannot load it: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(what):
            first = min(map(str, report[what]))
            raise CheckpointError(f"{path}: {what.replace('_', ' ')} in its weights, such as {first}")
    model.requires_grad_(requires_grad=False).to(device).train(mode=False)
    for each in (*model.parameters(), *model.buffers()):
        if each.device.type == "cpu":  # it may lie in the mapped file, where others can write
            each.data = each.data.clone()
    try:
        with torch.inference_mode():
            decoder, kv_shapes = build(
                model,
                kernels,
                partial(_pack, kernels.operations.linear, form),
                partial(_pack, kernels.operations.gated_linear, form),
                partial(_pack, kernels.operations.linear, None),
            )
    except UnsupportedModel as error:
        raise CheckpointError(f"{path}: {config.model_type} is not supported: {error}") from error
    if len(kv_shapes) != 1:
        raise CheckpointError(f"{path}: {config.model_type} is not supported: layers with KV of different shapes")
    num_kv_heads, head_dim = kv_shapes.pop()
    known = read_checkpoint(str(path))
    shape = ModelShape(
        family=known.family,
        vocab_size=known.vocab_size,
        num_layers=config.get_text_config(decoder=True).num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_tokens=known.context_tokens,
        dtype=dtype,
    )
    return decoder, shape


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: transformers cannot read its config.json: {error}") from error
    return config


def _pack(
    made: Callable[[torch.Tensor | QuantizedWeight, torch.Tensor | None], LinearMap],
    form: QuantForm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> LinearMap:
    return made(weight if form is None else quantize(weight, form), bias)
