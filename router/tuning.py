"""Tuned constants of the router's policy: each with its unit, its reason, and the bench that set it.

Bounds of protocols, timeouts and sizes of messages stand where they are used.
"""

from __future__ import annotations

# --- who computes and who decodes: `router.cost`, `router.placement` ---

STREAM_WEIGHT = 0.3
"""Seconds of a first token that are worth one second for which one running stream waits: streams bear some gaps. Set by
`bench.simulate` (elastic fleets of 2, 4 and 16, one seed each, 2026-11-28), as the next two: with 1, and larger costs
of opening and of seats, 2 % less was in time."""
FULL_S = 0.3
"""Seconds that decoding costs on a full worker, by its longer steps; on others, their share of it. With 1 s
about 10 % less was in time."""
OPENING_S = 6.0
"""Seconds that the first stream of an elastic worker costs: prompts would keep nobody waiting there without it. With n
streams another one costs 1 / (1 + n) of that. With 2 s about 3 % less was in
time, with 10 s as much."""
SEAT_S = 10.0
"""Seconds that a stream waits while as many as fit into a full worker end before it, or that other streams lose
where steps take their objective already. No bench: always a last resort."""
NOMINAL_TOKENS_PER_S = 1000.0
"""Prompt tokens per second of workers while no rate is measured. No bench: the first seconds of a cluster."""
DRAWS = 2
"""Partners that are looked at, as many more of those that hold most of the prompt (Mitzenmacher 2001: near the best,
and no herd on old figures)."""
DECODE_DRAWS = 8
"""Decode workers that are looked at: streams join others only on a worker that is drawn. Set by `bench.simulate` (16
elastic workers): 4 attain 8 % less, 2 attain 12 % less."""
SPARE_SHARE = 0.75
"""Share of a decode worker that may be in use with a stream which an overloaded one moves there: nearly full, it would
soon do the same. No bench: only overload meets it."""

# --- workers that failed: `router.ejection` ---

IN_A_ROW = 3
"""Failures in a row for which a worker or pair is set aside. No bench, as for all below: only faults meet them."""
WINDOW = 16
"""Outcomes of a subject that are remembered."""
MOST_OF_WINDOW = 8
"""Failures among these for which it is set aside."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""Seconds set aside: doubled with each failed probe."""
SEVERAL_PARTNERS = 2
"""Partners with which hand-offs of a worker fail before the worker is at fault, not the pair."""

# --- how many run: `router.status`, `router.admission` ---

FEWEST_ACTIVE = 256
"""Requests that may be under way, however few seats there are. No bench."""
ACTIVE_PER_SEAT = 2
"""Requests under way per seat: for each that decodes one whose prompt is computed or waits. No bench."""
DEPARTURE_WEIGHT = 0.2
"""Weight of the newest interval between two departures, from which waiting times are foretold. No bench."""
