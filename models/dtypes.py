"""What torch calls the dtypes that weights and KV may have."""

from __future__ import annotations

import torch

from tandem.kv_layout import DType

_TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's dtype of that name."""
    return _TORCH_DTYPES[dtype]
