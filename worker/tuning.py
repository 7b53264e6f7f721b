"""Tuned constants of the policy of workers: each with its unit, its reason, and the bench that set it.

Bounds of protocols, timeouts and sizes of messages stand where they are used.
"""

from __future__ import annotations

# --- who gets blocks: `worker.admission`, `prefill_worker.prompt_line`, `decode_worker.reservations` ---

MAX_OVERTAKES = 64
"""Requests that may get room before one that came earlier: so many small ones fill a pool beside a large one. No bench:
a bound against starvation."""
TURN_TOKENS = 4
"""Tokens computed since a prompt came, per token of its own, after which newcomers no longer go before it. No bench: a
bound against starvation."""
LOOK_AHEAD = 32
"""Requests in line of which one is looked for that fits: they are looked at in every step. No bench: a bound of the
control loop's time."""
SEATS_AHEAD = 4
"""Sequences per seat that run, wait to run or are under way: seats stay filled while a hand-off takes up to three times
the time of decoding. Set by `tests/unit/decode_worker/test_pool_policy.py`."""
HOLDER_SHARE = 0.5
"""Share of the pool that the prompts of one holder may have. No bench: one slow destination must not take all."""

# --- expected growth: `worker.admission.Forecast` ---

REMEMBERED = 128
"""Completions, and destinations of prompts, that are remembered: some minutes of a small worker, seconds of a large
one. Set by `tests/unit/decode_worker/test_pool_policy.py`."""
FIRST_GUESS_TOKENS = 256
"""The only length of a completion that is remembered before any has ended. No bench: it is soon forgotten."""
PROMPT_STEPS = 64
"""Steps in which running sequences grow while a prompt for another worker holds its blocks: about a second. No
bench."""

# --- prompts beside decodes: `worker.budget` ---

OBJECTIVE_STEPS = 2.2
"""Shortest decode steps that a step may take. Set by `bench.simulate` (decode-heavy, 2026-11-23): 2.0 attains 3 % less.
"""
FIXED_COSTS = 4
"""Fixed costs in a mixed step and its chunk: prompts get two thirds of what their tokens alone would, though the fixed
cost may be taken for a third too little. Set by `bench.simulate` (6eaa3f8)."""
GRAINS = 128
"""Multiples of a chunk that budgets are: few shapes of steps occur. No bench."""
FIRST_GRAINS = 8
"""Multiples beside decodes, before anything is known of either. No bench: the first steps of a process."""
FEWEST_SMALL = 8
"""Mixed steps with few prompt tokens that tell a fixed cost: the first ones may compile kernels or stand still. No
bench, as for the weights: `tests/unit/worker/test_fixed_cost.py` holds what they must reach."""
WEIGHT = 1 / 8
"""Weight of the newest step in an average."""
WEIGHT_BELOW = 1 / 2
"""Weight of a step that is shorter than the average: what made the others longer was something else."""
WEIGHT_ABOVE = 1 / 48
"""Weight of a step that is longer than the least: fixed costs are remembered while chunks of one size hide them."""
MOST_GAIN = 4.0
"""Times their rate alone that prompts get beside decodes at most: less than no time cannot be measured. No bench."""
RATE_TOKENS = 4096
"""Prompt tokens over which their rate is averaged: noise of one step hides what few tokens add. No bench."""

# --- an overloaded worker: `decode_worker.moves` ---

MANY_PREEMPTIONS = 3
"""Preemptions within `OVERLOAD_S` that are too many. No bench, as for all three below: only overload meets them."""
OVERLOAD_S = 10.0
"""Seconds over which preemptions count, and between two offers of an overloaded worker."""
FULL_SHARE = 0.25
"""Available share of the pool below which there is little room. What a victim leaves is available for a moment."""
STAY_S = 60.0
"""Seconds for which a request that moved to here is not offered again because of overload."""
