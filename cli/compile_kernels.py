"""`tandem compile`: Triton's kernels of a model, compiled before a worker on a GPU starts."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from cli.command import Subparsers, add_command
from models.files.hub import fetched
from shell.config import DecodeConfig, add_arguments, load
from tandem.errors import ConfigError

_LEAST_ARCH = 80
"""That workers take."""
_ARCH = re.compile(r"(?:sm_)?(\d{2,3})")


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "compile",
        run,
        "Compiles what a worker with these options compiles when it starts, for GPUs that need not be there: for an "
        "image or a volume. Workers take the folder as TRITON_CACHE_DIR, at the same path, and need the same triton. "
        "Loads the weights into memory. Takes the options of a worker.",
    )
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="folder to fill; what it has stays")
    parser.add_argument(
        "--arch", type=_arch, nargs="+", required=True, metavar="SM", help="compute capabilities, such as 80 86 90"
    )
    add_arguments(parser, DecodeConfig)


def run(namespace: argparse.Namespace) -> int:
    """Prints what was compiled. Raises ConfigError and CheckpointError."""
    config = load(DecodeConfig, namespace)
    config = replace(config, model=fetched(config.model))
    try:
        from engine.kernel_cache import fill_kernel_cache
    except ModuleNotFoundError as error:
        raise ConfigError("tandem compile", f"needs {error.name}; install the extra `gpu`") from error
    for each in fill_kernel_cache(config, namespace.arch, namespace.cache):
        print(f"sm_{each.arch}: {each.num_compiled} kernels compiled, {each.num_found} were there")
    return 0


def _arch(text: str) -> int:
    found = _ARCH.fullmatch(text)
    if found is None or int(found[1]) < _LEAST_ARCH:
        raise argparse.ArgumentTypeError(f"{text} is no compute capability of {_LEAST_ARCH} or more, such as 90")
    return int(found[1])
