"""`python -m router`: a single router process."""

from __future__ import annotations

import sys

from router.app import run
from shell.config import RouterConfig
from shell.rpc.process import run_module


def main() -> int:
    """Returns the exit code."""
    return run_module(
        "python -m router", "Admits, places and owns requests; clients and workers connect to it.", RouterConfig, run
    )


if __name__ == "__main__":
    sys.exit(main())
