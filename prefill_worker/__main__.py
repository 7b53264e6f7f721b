"""`python -m prefill_worker`: the process of a prefill worker."""

from __future__ import annotations

import sys

from prefill_worker.app import run
from shell.config import PrefillConfig
from shell.rpc.process import run_module


def main() -> int:
    """Returns the exit code."""
    return run_module("python -m prefill_worker", "Computes prompts and pushes their KV.", PrefillConfig, run)


if __name__ == "__main__":
    sys.exit(main())
