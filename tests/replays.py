"""Stand-ins for the capture of CUDA graphs: replaying means calling the recorded work again, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from kernels.operations import LinearMap


class CallAgain:
    """A capturer for a CPU: the first `refuses` captures find no memory, and those `broken`, by number, break."""

    num_bytes = 0

    def __init__(
        self, refuses: int = 0, *, broken: Container[int] = (), says: type[RuntimeError] = torch.OutOfMemoryError
    ) -> None:
        self.num_captured = self.num_replayed = self._num_asked = 0
        self._refuses = refuses
        self._broken = broken
        self._says = says

    def capture(self, work: Callable[[], None]) -> Replay:
        self._num_asked += 1
        if self._num_asked in self._broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self._num_asked <= self._refuses:
            raise self._says("CUDA error: out of memory")
        self.num_captured += 1
        work()
        return Replay(self, work)


class Replay:
    def __init__(self, capturer: CallAgain, work: Callable[[], None]) -> None:
        self._capturer = capturer
        self._work = work

    def replay(self) -> None:
        self._capturer.num_replayed += 1
        self._work()


def rows_apart(product: LinearMap) -> LinearMap:
    """Returns the product of each row alone: torch's results depend on how many rows there are. Padding is no NaN."""

    def apart(x: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any()
        return torch.cat([product(row) for row in x.split(1)]) if len(x) else product(x)

    return apart
