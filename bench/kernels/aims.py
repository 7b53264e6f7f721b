"""What the GPU kernels should reach, beside what they did reach. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.ceilings import Ceilings
from bench.kernels.decode_share import StepShares
from bench.kernels.launch_gaps import CAPTURED, OVERLAPPED, LaunchGap
from bench.kernels.measurement import Measurement

_PREFILL_SHARE = 0.6
_DECODE_SHARE = 0.85
_SMALL_SHARE = 0.05
_IDLE_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure and the bound it is held against."""

    name: str
    found: float
    bound: float
    at_least: bool
    """Whether `bound` is the least wanted, or the most allowed."""

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps the bound."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        wanted = "at least" if self.at_least else "at most"
        return f"{'met   ' if self.is_met else 'MISSED'} {self.found:.3f} ({wanted} {self.bound:g}): {self.name}"


def attention_aims(rows: Sequence[Measurement], ceilings: Ceilings, own: Sequence[str]) -> list[Aim]:
    """Of our own kernel sets `own`: prefill of 8k tokens at head_dim 128, every decode of 32 seqs or more."""
    aims = []
    for row in rows:
        if row.by not in own:
            continue
        if row.kernel == "prefill" and row.shape.startswith("prefill 1 × 8192,") and " D 128 " in row.shape:
            share = row.tflop_s / ceilings.bf16_tflop_s
            aims.append(Aim(f"{row.by}, {row.shape}, of the measured GEMM", share, _PREFILL_SHARE, at_least=True))
        if row.kernel == "decode" and int(row.shape.split()[1]) >= 32:
            share = row.gb_s / ceilings.copy_gb_s
            aims.append(Aim(f"{row.by}, {row.shape}, of copy bandwidth", share, _DECODE_SHARE, at_least=True))
    return aims


def step_aims(shares: Sequence[StepShares], gaps: Sequence[LaunchGap]) -> list[Aim]:
    """Small operations and sampling within a step; launch gaps of what is captured."""
    return [
        *(
            Aim(
                f"{each.by}, {each.model} decode {each.batch} × {each.context}, small operations and sampling",
                each.small_share,
                _SMALL_SHARE,
                at_least=False,
            )
            for each in shares
        ),
        *(
            Aim(f"device idle, {gap.how}", gap.idle_share, _IDLE_SHARE, at_least=False)
            for gap in gaps
            if gap.how in (CAPTURED, OVERLAPPED) and gap.busy_s  # else the profiler saw nothing
        ),
    ]
