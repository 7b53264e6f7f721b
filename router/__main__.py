"""`python -m router`: one router process."""

from __future__ import annotations

import argparse
import sys

from router.app import run
from tandem.config import RouterConfig, add_arguments, load
from tandem.errors import ConfigError


def main() -> int:
    """Reads argv and environment; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    add_arguments(parser, RouterConfig)
    try:
        config = load(RouterConfig, parser.parse_args())
    except ConfigError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
