"""Ways of quantising that are read, by `quant_method` in config.json. Needs no torch: routers ask too."""

from __future__ import annotations

METHODS = ("gptq", "awq", "fp8", "fbgemm_fp8", "compressed-tensors", "torchao", "modelopt", "mxfp4")
REMEDY = "take the checkpoint that it was made from, and --quantize"
SECTIONS = ("quantization_config", "compression_config")
"""Keys of config.json, of which one says how a checkpoint is quantised."""
