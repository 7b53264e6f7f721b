"""Load on a server that is started for it, as JSON: `python -m bench.served [OPTION of tandem serve …]`."""

from __future__ import annotations

import json
import sys

from bench.cluster import START_TIMEOUT_S, serve
from bench.load import run
from bench.workload import LoadOptions
from kernels.triton import COMPILED
from tandem.client import Client

LOAD = LoadOptions(rate_per_s=None, concurrency=16, num_requests=96, num_warmup=8, prompt_tokens=512, output_tokens=64)
_TIMEOUT_S = 60.0
"""Of one request."""


def main(arguments: list[str]) -> int:
    """Prints the report without its single requests; 1 if any request failed, or had a kernel compiled for it."""
    with serve("demo", *arguments) as cluster:
        with Client(cluster.target) as client:
            client.wait_ready(START_TIMEOUT_S)
        report = run(cluster.target, LOAD, _TIMEOUT_S)
    figures = json.loads(report.as_json())
    del figures["requests"]
    print(json.dumps(figures, indent=2))
    compiled = [line for line in cluster.log if COMPILED in line]
    print("".join(compiled), end="", file=sys.stderr)
    return 0 if report.num_succeeded == LOAD.num_requests and not compiled else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
