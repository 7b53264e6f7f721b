"""Runs inside each child of `tandem serve`, before its program: binds it to parent, cores and GPUs.

`python -m cli.launch --parent PID --cores 0,1 --nice 0 [--gpus GPU,GPU] MODULE ARG…` becomes
`python -m MODULE ARG…`: settings survive exec. Done here rather than between fork and exec in the
parent, whose gRPC threads make that unsafe.

`python -m cli.launch --parent PID --fork-server` imports what workers import, says so on the socket that is its
standard input, and forks a child of PID for each packet that comes from there: the arguments above as a JSON list, with
a socket on which the child says its process id and hears that it is wanted, and its standard output and error.
`fork_server` is the other side.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

from shell.config import show_gpus
from shell.module_command import module_command

_PR_SET_PDEATHSIG = 1
FORKED = ("prefill_worker", "decode_worker")
"""Modules that the fork server has imported."""
_MAX_ORDER_BYTES = 1 << 17
_ADOPTED_WITHIN_S, _ADOPTED_POLL_S = 5.0, 0.0005


def launch_command(
    module: str, arguments: Sequence[str], cores: Sequence[int], nice: int, gpus: Sequence[str] = ()
) -> list[str]:
    """The command line of a child of this process; no `gpus` = it sees those that this process does."""
    return [
        *fork_server_command()[:-1],
        *("--cores", ",".join(map(str, cores)), "--nice", str(nice)),
        *(("--gpus", ",".join(gpus)) if gpus else ()),
        *(module, *arguments),
    ]


def fork_server_command() -> list[str]:
    """The command line of a child of this process that forks others."""
    return module_command("cli.launch", "--parent", str(os.getpid()), "--fork-server")


def orders(command: Sequence[str]) -> bytes:
    """What has a fork server fork the child that this `launch_command` would start."""
    return json.dumps(command[3:]).encode()


def main() -> None:
    """Binds this process and becomes MODULE; ends with exit code 1 if the parent is gone already."""
    options = _parsed(sys.argv[1:])
    _end_with(options.parent)
    if options.fork_server:
        _serve_forks()
        return
    _settle(options)
    os.execv(sys.executable, module_command(options.module, *options.arguments))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cli.launch", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fork-server", action="store_true")
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
    if options.gpus is not None:
        show_gpus(options.gpus)


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies; exits with 1 if it has another one already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _serve_forks() -> None:
    """Returns when the parent has hung up; in a child, when that has run its module."""
    orders = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    _read_nothing()
    for module in FORKED:
        importlib.import_module(f"{module}.app")
    gc.collect()
    gc.freeze()  # a collection in a child would copy what it walks
    with contextlib.suppress(BrokenPipeError):  # the parent has ended: what is read next is the end
        orders.send(b"ready")
    while True:
        try:
            words, descriptors, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 3)
        except ConnectionResetError:  # the parent ended without having read "ready"
            return
        if not words:
            return
        if (pid := _forked()) == 0:
            orders.close()
            if _forked():
                os._exit(0)  # the other one is the parent's from now on
            _become(_parsed(json.loads(words)), *descriptors)
            return
        os.waitpid(pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _forked() -> int:
    """As `os.fork`. The only other threads are numpy's, of which it takes care: Python warns of any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(options: argparse.Namespace, asking: int, stdout: int, stderr: int) -> None:
    """Runs MODULE in this very process: after an exec nothing would be imported any more."""
    ends_s = time.monotonic() + _ADOPTED_WITHIN_S
    while os.getppid() != options.parent and time.monotonic() < ends_s:  # the process in between ends
        time.sleep(_ADOPTED_POLL_S)
    _end_with(options.parent)
    os.setpgid(0, 0)
    with socket.socket(fileno=asking) as asked:
        asked.send(str(os.getpid()).encode())
        if not asked.recv(1):
            sys.exit(1)  # nobody waits for it any more
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _settle(options)
    sys.argv = [options.module, *options.arguments]
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    try:
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):  # else it is words, which Python prints
            _exit_at_once(end.code)
        raise


def _exit_at_once(code: int) -> NoReturn:
    """Leaves all that was imported as it is: to take it apart costs a copy of the memory that forks share."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read_nothing() -> None:
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())


if __name__ == "__main__":
    main()
