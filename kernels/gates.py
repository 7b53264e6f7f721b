"""What the gates of a gated MLP become before they multiply its ups. Needs no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Activation(enum.Enum):
    """Activations by their names in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    """Gelu by its approximation with tanh."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, of gates up to `limit` and ups within it (gpt-oss)."""

    alpha: float
    limit: float


Gate = Activation | ClampedSwiglu
