"""How much memory of its GPU is taken, by whomever: for people who look."""

from __future__ import annotations

import torch

from shell.clock import Clock

_PERIOD_S = 5.0
"""CUDA takes a lock to tell, for which a launch would wait."""


class DeviceGauge:
    """Asks CUDA every few seconds at most. On a CPU it says 0 of 0."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._due_s = clock.now_s()
        self._used_and_total = (0, 0)

    def __call__(self) -> tuple[int, int]:
        """Returns the bytes that are taken, and all."""
        if self._device.type == "cuda" and self._clock.now_s() >= self._due_s:
            self._due_s = self._clock.now_s() + _PERIOD_S
            free, total = torch.cuda.mem_get_info(self._device)
            self._used_and_total = total - free, total
        return self._used_and_total
