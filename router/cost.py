"""The cost of a request on a pair of workers, in seconds: the one measure by which placement chooses. Pure.

- line: prompt tokens that wait where the prompt is computed, by the worker's rate
- compute: tokens that this worker lacks, by its rate
- hand-off: as long as those before it took, for the share that the decode worker lacks
- seat: `SEAT_S` for each time that the decode worker is full before the request's turn comes, and once if its steps
  take their objective already: it comes after all that have room and time
- streams: what running streams lose, and the request's own stream:
  `STREAM_WEIGHT` * compute, for each stream of the worker that computes;
  `STREAM_WEIGHT` * line of an elastic decode worker, if another worker computes the prompt;
  `FULL_S` * share of the decode worker in use: longer steps;
  `OPENING_S` / (1 + streams) on an elastic decode worker: prompts avoid workers that have streams
"""

from __future__ import annotations

import math
from typing import NamedTuple

from router.tuning import FULL_S, OPENING_S, SEAT_S, STREAM_WEIGHT
from router.worker_view import Demand, WorkerView
from tandem.types import Role


class Cost(NamedTuple):
    """Cost of a request on a pair of workers, in seconds."""

    line_s: float
    compute_s: float
    handoff_s: float
    seat_s: float
    streams_s: float

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(self)


def cost(demand: Demand, prefill: WorkerView | None, decode: WorkerView, unmeasured: float) -> Cost:
    """Returns the cost of `demand` on a pair; without `prefill` the decode worker computes the prompt.

    `unmeasured`: prompt tokens per second of a worker that has measured none.
    """
    line_s = compute_s = handoff_s = 0.0
    share = decode.share_with(demand)
    turns = max(0, math.ceil(share) - 1) + decode.is_at_objective
    streams_s = FULL_S * share
    if decode.info.role is Role.ELASTIC:
        streams_s += OPENING_S / (1 + decode.num_seqs)
        if prefill is not None:
            streams_s += STREAM_WEIGHT * decode.line_s(unmeasured)
    if demand.source is None:
        computing = prefill or decode
        line_s, compute_s = computing.line_s(unmeasured), computing.compute_s(demand, unmeasured)
        streams_s += STREAM_WEIGHT * compute_s * computing.running_seqs
    if prefill is not None:
        handoff_s = demand.handoff_s * decode.lacking_tokens(demand) / demand.num_tokens
    return Cost(line_s, compute_s, handoff_s, SEAT_S * turns, streams_s)
