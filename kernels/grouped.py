"""Linear maps of experts as one operation: each row is multiplied by the weight of its own expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

_GROUPED_CAPABILITIES = (9, 10)
"""Major ones: `_grouped_mm` of torch 2.11 to 2.13, whose fallback waits for the device."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Which of M rows each of X experts has; known on the device alone."""

    ids: torch.Tensor
    """`[M]` int64: the expert of each row, ascending."""
    ends: torch.Tensor
    """`[X]` int32: the row behind the last of each expert."""

    @classmethod
    def of(cls, ids: torch.Tensor, num_experts: int) -> ExpertRows:
        """Finds where the rows of each expert end; the host does not wait."""
        experts = torch.arange(num_experts, device=ids.device)
        return cls(ids, torch.searchsorted(ids, experts, right=True, out_int32=True))


class GroupedMap(Protocol):
    """A weight per expert, in the form that its implementation reads fastest."""

    @property
    def waits_for_device(self) -> bool:
        """Whether a call reads on the host what a device computed, so that no graph can hold it."""

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """X `[M, in]` → `[M, out]`."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainGrouped:
    """Weights in bfloat16, multiplied by torch."""

    weight: torch.Tensor  # [X, out, in] bfloat16
    bias: torch.Tensor | None  # [X, out]

    @property
    def waits_for_device(self) -> bool:
        """On GPUs for which torch has no grouped product it reads on the host where each expert's rows end."""
        device = self.weight.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in _GROUPED_CAPABILITIES

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """See `GroupedMap`; with a bias rounded twice."""
        out = torch._grouped_mm(x, self.weight.transpose(1, 2), offs=rows.ends)
        return out if self.bias is None else out + self.bias[rows.ids]
