"""`python -m decode_worker`: the process of a decode worker."""

from __future__ import annotations

import sys

from decode_worker.app import run
from shell.config import DecodeConfig
from shell.rpc.process import run_module


def main() -> int:
    """Returns the exit code."""
    return run_module("python -m decode_worker", "Owns a paged KV pool and decodes in it.", DecodeConfig, run)


if __name__ == "__main__":
    sys.exit(main())
