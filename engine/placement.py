"""Where the engine thread runs: how many threads compute, on which cores, how politely.

Measured (shell/cores.py): two workers whose threads share cores at equal priority stall each
other for up to a second, so this is part of the design. All three settings belong to the
calling thread and to those that it will start (OpenMP's, the native kernels' team), not to the process.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ThreadPlacement:
    """None leaves the process's own setting."""

    threads: int | None = None
    """Torch's intra-op threads."""
    cpus: frozenset[int] | None = None
    """Cores that the thread may use (Linux)."""
    nice: int | None = None
    """Priority from -20 to 19, lower runs first (Linux)."""

    def apply(self) -> None:
        """Sets them for the calling thread. Raises OSError if the system refuses."""
        if self.cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cpus)  # before any thread inherits it
        if self.nice is not None and hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self.nice)
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def open_engine_executor(placement: ThreadPlacement) -> ThreadPoolExecutor:
    """Starts the one thread that models are loaded and stepped on. The caller shuts it down.

    Loading there too keeps the whole process at one pool of threads. Raises ConfigError if the system refuses.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-engine")
    try:
        executor.submit(placement.apply).result()
    except OSError as error:
        executor.shutdown()
        raise ConfigError("--threads", f"{placement} is refused: {error}") from error
    return executor
