"""For every test: one compute thread. Tensors are tiny and tests share the cores; a second thread only spins."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; processes that tests start inherit it
