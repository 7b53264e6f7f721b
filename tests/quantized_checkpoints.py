"""Writes tiny checkpoints in published quantised forms, value by value as the forms are described.

Nothing of the code under test is used: each writer packs by plain loops over bits, and returns beside the tensors what
the weight means.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

PLAIN = ("embed_tokens", "norm", "lm_head")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Parts = dict[str, torch.Tensor]
Encoded = tuple[Parts, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """One published form: what config.json says, and how a weight `[out, in]` is written."""

    name: str
    config: Mapping[str, Any]
    encode: Callable[[torch.Tensor], Encoded] = field(repr=False)


def write(form: Form, plain: Path, folder: Path) -> tuple[Path, Path]:
    """Folders of the quantised checkpoint, and of a plain one that means the same; both from `plain`, float32."""
    quantized, meant = (shutil.copytree(plain, folder / name) for name in ("quantized", "meant"))
    parts, weights = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() != 2 or any(each in name for each in PLAIN):
            parts[name] = weights[name] = tensor
            continue
        encoded, weights[name] = form.encode(tensor)
        parts |= {f"{name.removesuffix('.weight')}.{part}": each.contiguous() for part, each in encoded.items()}
    save_file(parts, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(
        {name: each.contiguous() for name, each in weights.items()},
        meant / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": dict(form.config)}))
    return quantized, meant


def pack(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes `[rows, n]` into int32 words along n, the lowest bits first."""
    per_word = 32 // bits
    rows, count = codes.shape
    words = np.zeros((rows, -(-count // per_word)), dtype=np.uint32)
    for position in range(count):
        words[:, position // per_word] |= codes[:, position].astype(np.uint32) << np.uint32(
            bits * (position % per_word)
        )
    return torch.from_numpy(words.view(np.int32).copy())


def rounded(weight: torch.Tensor, bits: int, groups: np.ndarray, *, symmetric: bool = False):
    """Codes `[out, in]`, zeros and scales `[out, groups]`, and what they mean; `groups` names each input's group."""
    wide = weight.numpy()
    top, count = (1 << bits) - 1, int(groups.max()) + 1
    zeros, scales = np.zeros((len(wide), count)), np.zeros((len(wide), count), dtype=np.float16)
    for group in range(count):
        part = wide[:, groups == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / (top / 2)
            zeros[:, group] = 1 << (bits - 1)
        else:
            scales[:, group] = (part.max(1) - part.min(1)) / top
            zeros[:, group] = np.clip(np.round(-part.min(1) / scales[:, group]), 1, top)
    each_scale, each_zero = scales.astype(np.float64)[:, groups], zeros[:, groups]
    codes = np.clip(np.round(wide / each_scale) + each_zero, 0, top).astype(np.uint8)
    meant = torch.from_numpy((codes - each_zero) * each_scale).to(torch.float32)
    return codes, zeros.astype(np.uint8), torch.from_numpy(scales), meant


def in_order(num_inputs: int, group: int) -> np.ndarray:
    return np.arange(num_inputs) // group


def gptq(bits: int, *, version: int = 1, group: int = 32, act_order: bool = False, zero_bias: bool = False) -> Form:
    def encode(weight: torch.Tensor) -> Encoded:
        num_outputs, num_inputs = weight.shape
        size = num_inputs if group == -1 else group
        groups = in_order(num_inputs, size)
        if act_order:
            groups = np.random.default_rng(0).permutation(groups)
        codes, zeros, scales, meant = rounded(weight, bits, groups)
        stored = (zeros - 1).astype(np.uint8) if version == 1 else zeros
        parts = {
            "qweight": pack(codes, bits).new_tensor(pack(codes, bits).numpy().T.copy()),
            "qzeros": pack(stored.T, bits),
            "scales": scales.t(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        if zero_bias:
            parts["bias"] = torch.zeros(num_outputs, dtype=torch.float16)
        return parts, meant

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    name = f"gptq-{bits}-v{version}-by{group}{'-act-order' if act_order else ''}"
    return Form(name, config, encode)


def awq(group: int = 32) -> Form:
    def encode(weight: torch.Tensor) -> Encoded:
        codes, zeros, scales, meant = rounded(weight, 4, in_order(weight.shape[1], group))
        # word position p of eight neighbouring outputs holds output AWQ_ORDER[p]
        order = [8 * block + each for block in range(len(codes) // 8) for each in AWQ_ORDER]
        parts = {"qweight": pack(codes.T[:, order], 4), "qzeros": pack(zeros.T[:, order], 4), "scales": scales.t()}
        return parts, meant

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Form("awq", config | {"modules_to_not_convert": ["lm_head"]}, encode)


def compressed(
    written: str, weights: Mapping[str, Any], encode: Callable[[torch.Tensor], Encoded], **group: Any
) -> Form:
    config = {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights), **group}},
    }
    return Form(f"{written}-{weights['num_bits']}-{weights['strategy']}-{weights['symmetric']}", config, encode)


def packed(bits: int, *, group: int | None, symmetric: bool) -> Form:
    def encode(weight: torch.Tensor) -> Encoded:
        num_inputs = weight.shape[1]
        groups = in_order(num_inputs, group or num_inputs)
        codes, zeros, scales, meant = rounded(weight, bits, groups, symmetric=symmetric)
        parts = {"weight_packed": pack(codes, bits), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:  # signed zeros are packed like values: 2 ** (bits - 1) above
            parts["weight_zero_point"] = torch.from_numpy(pack(zeros.T.copy(), bits).numpy().T.copy())
        return parts, meant

    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return compressed("pack-quantized", weights, encode)


def int8_by_output(weight: torch.Tensor) -> Encoded:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values * scale


def float8(weight: torch.Tensor, scale: torch.Tensor, spread: torch.Tensor, name: str, **more: torch.Tensor) -> Encoded:
    """`spread` is `scale` for each weight."""
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": values, name: scale, **more}, values.to(torch.float32) * spread


def float8_by_output(weight: torch.Tensor) -> Encoded:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return float8(weight, scale, scale, "weight_scale")


def float8_of_all(weight: torch.Tensor) -> Encoded:
    scale = weight.abs().amax().reshape(1) / 448
    return float8(weight, scale, scale, "weight_scale", input_scale=torch.ones(1))


def float8_by_block(name: str, size: int) -> Callable[[torch.Tensor], Encoded]:
    def encode(weight: torch.Tensor) -> Encoded:
        rows, columns = (-(-length // size) for length in weight.shape)
        scale = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                block = weight[row * size : (row + 1) * size, column * size : (column + 1) * size]
                scale[row, column] = block.abs().max() / 448
        spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
        return float8(weight, scale, spread, name)

    return encode


def torchao(kind: str, encode: Callable[[torch.Tensor], Encoded], **told: Any) -> Form:
    def named(weight: torch.Tensor) -> Encoded:
        parts, meant = encode(weight)
        renamed = {"weight": "_weight_qdata", "weight_scale": "_weight_scale", "zeros": "_weight_zero_point"}
        return {renamed[name]: each for name, each in parts.items()}, meant

    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": told}}}
    return Form(f"torchao-{kind}", config, named)


def int8_by_group(weight: torch.Tensor) -> Encoded:
    groups = in_order(weight.shape[1], 32)
    codes, zeros, scales, meant = rounded(weight, 8, groups)
    values, signed = ((torch.from_numpy(each).to(torch.int16) - 128).to(torch.int8) for each in (codes, zeros))
    return {"weight": values, "weight_scale": scales, "zeros": signed}, meant


def nvfp4(values: str, whole: str, *, divides: bool) -> Callable[[torch.Tensor], Encoded]:
    def encode(weight: torch.Tensor) -> Encoded:
        num_outputs, num_inputs = weight.shape
        unit = weight.abs().max() / (6 * 448)
        grouped = weight.reshape(-1, 16)
        scales = (grouped.abs().amax(1) / 6 / unit).to(torch.float8_e4m3fn)
        blocks, meant = np.zeros((len(grouped), 8), dtype=np.uint8), torch.zeros_like(grouped)
        for row, group in enumerate(grouped):
            scale = float(scales[row].float() * unit)
            for i, value in enumerate(group.tolist()):
                code = int(np.argmin(np.abs(np.array(E2M1) * scale - value)))
                blocks[row, i // 2] |= code << (4 * (i % 2))
                meant[row, i] = E2M1[code] * scale
        parts = {
            values: torch.from_numpy(blocks).view(num_outputs, num_inputs // 2),
            "weight_scale": scales.view(num_outputs, -1),
            whole: (1 / unit if divides else unit).reshape(1),
        }
        return parts, meant.view(num_outputs, num_inputs)

    return encode


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT8, FP8 = {"num_bits": 8, "type": "int", "symmetric": True}, {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {"input_activations": {"num_bits": 8, "dynamic": True}}

FORMS = (
    gptq(4),
    gptq(4, version=2, group=-1),
    gptq(8),
    gptq(4, act_order=True),
    gptq(4, group=64, zero_bias=True),  # does not divide 96 inputs
    awq(),
    packed(4, group=32, symmetric=True),
    packed(4, group=32, symmetric=False),
    packed(8, group=None, symmetric=True),
    compressed("int-quantized", INT8 | {"strategy": "channel"}, int8_by_output, **DYNAMIC),
    compressed("float-quantized", FP8 | {"strategy": "channel"}, float8_by_output, **DYNAMIC),
    compressed("naive-quantized", FP8 | {"strategy": "tensor"}, float8_of_all, **DYNAMIC),
    compressed(
        "float-quantized", FP8 | {"strategy": "block", "block_structure": [40, 40]}, float8_by_block("weight_scale", 40)
    ),
    Form(
        "fp8-blocks",
        {"quant_method": "fp8", "weight_block_size": [40, 40], "activation_scheme": "dynamic"},
        float8_by_block("weight_scale_inv", 40),
    ),
    Form("fp8", {"quant_method": "fp8", "activation_scheme": "static"}, float8_of_all),
    torchao("Int8WeightOnlyConfig", int8_by_output),
    torchao("IntxWeightOnlyConfig", int8_by_group, granularity={"_type": "PerGroup", "_data": {"group_size": 32}}),
    torchao("Float8WeightOnlyConfig", float8_by_output),
    compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    Form(
        "modelopt-nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4("weight", "weight_scale_2", divides=False),
    ),
    Form("modelopt-fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, float8_of_all),
)


def mxfp4(stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of experts `[X, in, out]`: blocks `[X, out, in / 32, 16]`, scales `[X, out, in / 32]`, and what they mean."""
    grouped = stacked.numpy().swapaxes(1, 2).reshape(-1, 32)
    blocks = np.zeros((len(grouped), 16), dtype=np.uint8)
    scales, meant = np.zeros(len(grouped), dtype=np.uint8), np.zeros_like(grouped)
    for row, values in enumerate(grouped):
        exponent = int(np.floor(np.log2(np.abs(values).max()))) - 2
        scales[row] = exponent + 127
        for i, value in enumerate(values / 2.0**exponent):
            code = int(np.argmin(np.abs(np.array(E2M1) - value)))
            blocks[row, i // 2] |= code << (4 * (i % 2))
            meant[row, i] = E2M1[code] * 2.0**exponent
    num_experts, num_inputs, num_outputs = stacked.shape
    shape = (num_experts, num_outputs, num_inputs // 32)
    whole = torch.from_numpy(meant).view(num_experts, num_outputs, num_inputs).transpose(1, 2)
    return torch.from_numpy(blocks).view(*shape, 16), torch.from_numpy(scales).view(shape), whole.contiguous()


def write_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """As `write`, of a checkpoint with stacked experts."""
    quantized, meant = (shutil.copytree(plain, folder / name) for name in ("quantized", "meant"))
    tensors = load_file(plain / "model.safetensors")
    parts, weights = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts[f"{name}_blocks"], parts[f"{name}_scales"], weights[name] = mxfp4(parts.pop(name))
    save_file(parts, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, meant / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, meant
