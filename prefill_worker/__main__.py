"""`python -m prefill_worker --model DIR --router HOST:PORT …`."""

from __future__ import annotations

import argparse
import sys

from prefill_worker.app import run
from tandem.config import PrefillConfig, add_arguments, load
from tandem.errors import ConfigError
from tandem.rpc.process import EXIT_BAD_CONFIG


def main() -> int:
    """Reads the options, runs the worker, returns the exit code."""
    parser = argparse.ArgumentParser(prog="prefill_worker", description="Computes prompts and pushes their KV.")
    add_arguments(parser, PrefillConfig)
    try:
        config = load(PrefillConfig, parser.parse_args())
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
