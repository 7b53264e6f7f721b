"""Runs inside each child of `tandem serve`, before its program: binds it to parent and cores.

`python -m cli.launch --parent PID --cores 0,1 --nice 0 MODULE ARG…` becomes
`python -m MODULE ARG…`: settings survive exec. Done here rather than between fork and exec in the
parent, whose gRPC threads make that unsafe.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def launch_command(module: str, arguments: Sequence[str], cores: Sequence[int], nice: int) -> list[str]:
    """The command line of a child of this process."""
    return [
        *(sys.executable, "-m", "cli.launch", "--parent", str(os.getpid())),
        *("--cores", ",".join(map(str, cores)), "--nice", str(nice), module, *arguments),
    ]


def main() -> None:
    """Binds this process and becomes MODULE; ends with exit code 1 if the parent is gone already."""
    parser = argparse.ArgumentParser(prog="python -m cli.launch", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--nice", type=int, required=True)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.parent:  # the parent died before the call above
        sys.exit(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    os.nice(options.nice)
    os.execv(sys.executable, [sys.executable, "-m", options.module, *options.arguments])


if __name__ == "__main__":
    main()
