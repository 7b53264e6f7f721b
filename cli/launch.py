"""Runs inside each child of `tandem serve`, before its program: binds it to parent, cores and GPUs.

`python -m cli.launch --parent PID --cores 0,1 --nice 0 [--gpus GPU,GPU] MODULE ARG…` becomes
`python -m MODULE ARG…`: settings survive exec. Done here rather than between fork and exec in the
parent, whose gRPC threads make that unsafe.

`python -m cli.launch --parent PID --standby` imports what workers import, which is most of what their start takes, and
waits for a line on standard input: the arguments above as a JSON list. Without one it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.config import show_gpus

_PR_SET_PDEATHSIG = 1
_AUTOGROUP_TRIES, _AUTOGROUP_PAUSE_S = 10, 0.11
STANDS_BY_FOR = ("prefill_worker", "decode_worker")
"""Modules that a standby may become."""


def launch_command(
    module: str, arguments: Sequence[str], cores: Sequence[int], nice: int, gpus: Sequence[str] = ()
) -> list[str]:
    """The command line of a child of this process; no `gpus` = it sees those that this process does."""
    return [
        *standby_command()[:-1],
        *("--cores", ",".join(map(str, cores)), "--nice", str(nice)),
        *(("--gpus", ",".join(gpus)) if gpus else ()),
        *(module, *arguments),
    ]


def standby_command() -> list[str]:
    """The command line of a child of this process that waits to become another."""
    return [sys.executable, "-m", "cli.launch", "--parent", str(os.getpid()), "--standby"]


def orders(command: Sequence[str]) -> bytes:
    """What makes a standby into the child that this `launch_command` would start."""
    return json.dumps(command[3:]).encode() + b"\n"


def main() -> None:
    """Binds this process and becomes MODULE; ends with exit code 1 if the parent is gone already."""
    options = _parsed(sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.parent:  # the parent died before the call above
        sys.exit(1)
    if options.standby:
        _stand_by()
        return
    _settle(options)
    os.execv(sys.executable, [sys.executable, "-m", options.module, *options.arguments])


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cli.launch", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--cores")
    parser.add_argument("--nice", type=int)
    parser.add_argument("--gpus")
    parser.add_argument("module", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def _settle(options: argparse.Namespace) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    os.nice(options.nice)
    _nice_session(os.nice(0))
    if options.gpus is not None:
        show_gpus(options.gpus)


def _nice_session(nice: int) -> None:
    """Each child is a session of its own, and a kernel that schedules by session counts niceness within it only."""
    for _ in range(_AUTOGROUP_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:  # the kernel takes ten a second from all who are not root
            time.sleep(_AUTOGROUP_PAUSE_S)
        except OSError:
            return  # it does not schedule by session
        else:
            return


def _stand_by() -> None:
    """Runs MODULE in this very process: after an exec nothing would be imported any more."""
    for module in STANDS_BY_FOR:
        importlib.import_module(f"{module}.app")
    line = sys.stdin.readline()
    if not line:
        return
    options = _parsed(json.loads(line))
    _settle(options)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    sys.argv = [options.module, *options.arguments]
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
