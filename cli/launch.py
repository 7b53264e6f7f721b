"""Runs inside each child of `tandem serve`, before its program: binds it to parent, cores and GPUs.

`python -m cli.launch --parent PID --cores 0,1 --nice 0 [--gpus GPU,GPU] [--loan LOAN] MODULE ARG…`
becomes `python -m MODULE ARG…`: settings survive exec. Done here rather than between fork and exec in the parent, whose
gRPC threads make that unsafe.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shell.config import lend_cores, show_gpus
from shell.module_command import module_command
from shell.parent import end_with


def launch_command(
    module: str,
    arguments: Sequence[str],
    cores: Sequence[int],
    nice: int,
    gpus: Sequence[str] = (),
    loan: str | None = None,
) -> list[str]:
    """Returns the command line of a child of this process; without `gpus` it sees those that this process sees.

    `loan` names cores of other workers that the child may borrow (`kernels/cpu/core_loans.py`).
    """
    return [
        *module_command("cli.launch", "--parent", str(os.getpid())),
        *("--cores", ",".join(map(str, cores)), "--nice", str(nice)),
        *(("--gpus", ",".join(gpus)) if gpus else ()),
        *(() if loan is None else ("--loan", loan)),
        *(module, *arguments),
    ]


def main() -> None:
    """Binds this process and becomes MODULE; ends with exit code 1 if the parent has ended already."""
    options = parsed(sys.argv[1:])
    end_with(options.parent)
    settle(options)
    os.execv(sys.executable, module_command(options.module, *options.arguments))


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options of this command; exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m cli.launch", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--nice", type=int, required=True)
    parser.add_argument("--gpus")
    parser.add_argument("--loan")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def settle(options: argparse.Namespace) -> None:
    """Gives this process the cores, the priority, the GPUs and the loan of `options`."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    os.nice(options.nice)
    if options.gpus is not None:
        show_gpus(options.gpus)
    if options.loan is not None:
        lend_cores(options.loan)


if __name__ == "__main__":
    main()
