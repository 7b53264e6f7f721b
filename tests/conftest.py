"""For every test: one compute thread, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

# Tensors are tiny and tests share the cores: a second thread only spins. Before torch loads; processes that tests start
# inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when anything imports triton: transformers does
