"""What torch calls the dtypes that weights and KV may have."""

from __future__ import annotations

import torch

from tandem.kv_layout import DType, QuantDType

_TORCH_DTYPES: dict[DType | QuantDType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
    QuantDType.INT8: torch.int8,
    QuantDType.FP8: torch.float8_e4m3fn,
}


def torch_dtype(dtype: DType | QuantDType) -> torch.dtype:
    """Torch's dtype of that name."""
    return _TORCH_DTYPES[dtype]
