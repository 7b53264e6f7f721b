"""The one thread that models are loaded and stepped on, and how many threads compute with it.

Loading there too keeps the whole process at one pool of threads. Cores and priority are the process's own: `cli.launch`
sets them before anything starts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def open_engine_executor(threads: int | None = None) -> ThreadPoolExecutor:
    """Starts the engine's thread, with `threads` of torch's in its operations; None leaves that as it is.

    The caller shuts it down.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-engine")
    if threads is not None:
        executor.submit(torch.set_num_threads, threads).result()
    return executor
