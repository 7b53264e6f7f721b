"""`python -m decode_worker --model DIR --router HOST:PORT …`."""

from __future__ import annotations

import argparse
import sys

from decode_worker.app import run
from tandem.config import DecodeConfig, add_arguments, load
from tandem.errors import ConfigError
from tandem.rpc.process import EXIT_BAD_CONFIG


def main() -> int:
    """Reads the options, runs the worker, returns the exit code."""
    parser = argparse.ArgumentParser(prog="decode_worker", description="Owns a paged KV pool and decodes in it.")
    add_arguments(parser, DecodeConfig)
    try:
        config = load(DecodeConfig, parser.parse_args())
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
