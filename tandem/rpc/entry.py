"""`python -m router` and its like: options in, exit code out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from tandem.config import add_arguments, load
from tandem.errors import ConfigError
from tandem.rpc.process import EXIT_BAD_CONFIG

C = TypeVar("C")


def run_module(prog: str, description: str, config_class: type[C], run: Callable[[C], int]) -> int:
    """Reads argv and environment into `config_class`, then runs; a bad option is exit code 2."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add_arguments(parser, config_class)
    try:
        config = load(config_class, parser.parse_args())
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return run(config)
