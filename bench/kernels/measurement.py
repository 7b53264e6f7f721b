"""One kernel at one shape by one implementation: how long it took, against what it must move and compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.ceilings import Ceilings
from bench.roofline import Cost

HEADER = f"{'kernel':<17}{'shape':<50}{'by':<11}{'µs':>11}{'GB/s':>9}{'TFLOP/s':>9}{'flop/B':>9}  share of ceiling"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kernel at one shape by one implementation."""

    kernel: str
    shape: str
    by: str
    time_s: float
    cost: Cost

    @property
    def gb_s(self) -> float:
        """Bytes that must move, per second."""
        return self.cost.num_bytes / self.time_s / 1e9

    @property
    def tflop_s(self) -> float:
        """Flops that must be computed, per second."""
        return self.cost.flops / self.time_s / 1e12

    def share(self, ceilings: Ceilings) -> float:
        """Of the roofline at this shape; more than 1 means that a cache served what memory was counted for."""
        return self.cost.limit_s(ceilings) / self.time_s

    def row(self, ceilings: Ceilings) -> str:
        """One line of the table."""
        bound = "memory" if self.cost.is_memory_bound(ceilings) else "compute"
        return (
            f"{self.kernel:<17}{self.shape:<50}{self.by:<11}{self.time_s * 1e6:>11.1f}{self.gb_s:>9.1f}"
            f"{self.tflop_s:>9.3f}{self.cost.intensity:>9.1f}  {self.share(ceilings):>6.1%} of {bound}"
        )

    def document(self, ceilings: Ceilings) -> dict[str, Any]:
        """For the record."""
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "by": self.by,
            "time_us": self.time_s * 1e6,
            "bytes": self.cost.num_bytes,
            "flops": self.cost.flops,
            "flops_per_byte": self.cost.intensity,
            "gb_s": self.gb_s,
            "tflop_s": self.tflop_s,
            "share_of_ceiling": self.share(ceilings),
            "bound": "memory" if self.cost.is_memory_bound(ceilings) else "compute",
        }
