"""CUDA graphs: work on a GPU recorded once, then launched as one. All graphs of a capturer share one memory pool."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaCapturer:
    """To be used on the engine thread, before anything else runs on the device.

    What a capture allocates and lets go is free for the next one: replays never overlap, so the
    pool is as large as the largest graph, if that is captured first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._reserved_before = self._reserved_now()

    @property
    def num_bytes(self) -> int:
        """Device memory that the captures so far have taken of torch's allocator; the driver's share is not known."""
        return self._reserved_now() - self._reserved_before

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Calls `work` twice, and records what it launches. Raises RuntimeError (torch) if that fails."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(current):  # set again at the end, whatever fails within
            # Compiles kernels and opens libraries, which a capture may not; those keep workspaces by stream.
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads ask of the device meanwhile is not recorded and does not disturb.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        current.wait_stream(self._stream)
        return graph

    def _reserved_now(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what is only kept for later is not taken
        return torch.cuda.memory_reserved(self._device)
