"""What it costs a worker to hand a step's tokens to a router's stream: `python -m bench.stream_cost`.

From drawn tokens to messages that are ready to be written, one token for each of many handles, in this thread
and without gRPC. Also runs in checkouts from before there was `RouterSession.token`: there a step's tokens go to
the session as a list of deltas.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.step import SampledToken
from tandem.types import Handle, Incarnation, TokenId

Step = Callable[[int], Sequence[Any]]
"""Takes the offset of the step's tokens, returns messages."""


def token_step(num_handles: int) -> Step:
    """As `worker.request` and `worker.serving.service` do."""
    session = importlib.import_module("worker.serving.router_session").RouterSession(Incarnation(secrets.token_hex(16)))
    handles = _opened(session, num_handles)
    token = SampledToken(TokenId(5), None)

    def step(offset: int) -> Sequence[Any]:
        for handle in handles:
            session.token(handle, 0, offset, token, None)
        messages: Sequence[Any] = session.take()
        return messages

    return step


def deltas_step(num_handles: int) -> Step:
    """As the step loop and the stream's writer did."""
    types: Any = importlib.import_module("tandem.types")
    session = importlib.import_module("tandem.rpc.router_session").RouterSession(Incarnation(secrets.token_hex(16)))
    handles = _opened(session, num_handles)
    token = TokenId(5)

    def step(offset: int) -> Sequence[Any]:
        session.deltas([(handle, types.TokenDelta(offset=offset, token_ids=(token,))) for handle in handles])
        messages: Sequence[Any] = session.outbox.take()
        return messages

    return step


def _opened(session: Any, num_handles: int) -> list[Handle]:
    handles = [Handle(number) for number in range(1, num_handles + 1)]
    for handle in handles:
        session.open_handle(handle)
    return handles


def measure(num_handles: int, num_steps: int) -> float:
    """Median seconds per token. Raises RuntimeError if messages do not hold every token."""
    has_token = importlib.util.find_spec("worker") is not None  # the room is younger than `deltas`
    step = (token_step if has_token else deltas_step)(num_handles)
    took_s = []
    for offset in range(num_steps):
        began_s = time.perf_counter()
        messages = step(offset)
        took_s.append(time.perf_counter() - began_s)
        made = [each.step_outputs for each in messages]
        if sum(len(each.token_ids) or len(each.outputs) for each in made) != num_handles:  # checkouts differ
            raise RuntimeError(f"{len(messages)} messages do not hold {num_handles} tokens")
    return statistics.median(took_s) / num_handles


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handles", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print(json.dumps({"handles": args.handles, "us_per_token": measure(args.handles, args.steps) * 1e6}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
