"""The one cost of placement: what it consists of, and that no cheaper pair is left aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.cost import cost
from router.placement import Demand, WorkerView, place
from router.tuning import DECODE_DRAWS, DRAWS, FULL_S, OPENING_S, SEAT_S, STREAM_WEIGHT
from tandem.types import Role

P, D, E = Role.PREFILL, Role.DECODE, Role.ELASTIC
DEMAND = Demand(num_tokens=1000, max_total_tokens=1100, num_prompt_tokens=1000, handoff_s=0.5)

View = Callable[..., WorkerView]


@pytest.fixture
def worker(view: View, load: Any) -> View:
    """A worker of 10 seats and 100 blocks that computes 500 prompt tokens per second."""

    def make(role: Role, name: str, held: int = 0, **changes: Any) -> WorkerView:
        heartbeat = load(**{"prompt_tokens_per_s": 500.0} | changes)
        heartbeat = replace(heartbeat, pool=replace(heartbeat.pool, total=10_000, free=10_000, live=0))
        made = view(role, name, heartbeat, max_seqs=10, max_sequence_tokens=4096, local_prefill_tokens=0)
        return replace(made, reported_tokens=0, likely_tokens=held)

    return make


def test_the_parts_of_a_pair(worker: View) -> None:
    prefill = worker(E, "p", held=200, queued_prompt_tokens=1500, running_seqs=3)
    decode = worker(E, "d", held=400, queued_prompt_tokens=500, running_seqs=4)
    found = cost(DEMAND, prefill, decode, 1.0)
    assert found[:4] == pytest.approx((3.0, 1.6, 0.3, 0.0))
    streams_s = STREAM_WEIGHT * (1.6 * 3 + 1.0) + FULL_S * 0.5 + OPENING_S / 5
    assert found.streams_s == pytest.approx(streams_s)
    assert found.total_s == pytest.approx(4.9 + streams_s)


def test_the_parts_of_a_worker_alone(worker: View) -> None:
    found = cost(DEMAND, None, worker(D, "d", held=500, running_seqs=4), 1.0)
    assert found == pytest.approx((0.0, 1.0, 0.0, 0.0, STREAM_WEIGHT * 4 + FULL_S * 0.5))


def test_a_full_worker_costs_the_wait_for_a_seat_and_so_do_steps_at_their_objective(worker: View) -> None:
    for streams, turns in ((9, 0), (10, 1), (19, 1), (20, 2)):
        assert cost(DEMAND, worker(P, "p"), worker(D, "d", running_seqs=streams), 1.0).seat_s == turns * SEAT_S
    slow, quick = (worker(D, "d", step_s=step_s, step_objective_s=0.05) for step_s in (0.05, 0.049))
    assert cost(DEMAND, None, slow, 1.0).seat_s == cost(DEMAND, None, quick, 1.0).seat_s + SEAT_S


def test_an_idle_worker_is_opened_rather_than_one_whose_steps_take_their_objective(worker: View) -> None:
    busy = worker(E, "busy", running_seqs=4, step_s=0.05, step_objective_s=0.05)
    assert place(DEMAND, [busy, worker(E, "idle")], Random(0)).decode.worker_id == "idle"


def test_what_is_handed_over_is_not_computed(worker: View) -> None:
    source = worker(E, "source", queued_prompt_tokens=9999, running_seqs=9)
    found = cost(replace(DEMAND, source=source.info), source, worker(D, "d"), 1.0)
    assert (found.line_s, found.compute_s) == (0.0, 0.0)
    assert found.streams_s == pytest.approx(FULL_S / 10)


def test_a_rate_that_was_not_measured_is_the_one_given(worker: View) -> None:
    unmeasured = worker(P, "p", prompt_tokens_per_s=0.0, queued_prompt_tokens=100)
    found = cost(DEMAND, unmeasured, worker(D, "d"), 200.0)
    assert (found.line_s, found.compute_s) == (0.5, 5.0)


@given(st.randoms(use_true_random=False), st.sampled_from(["line", "tokens", "hand-off", "streams"]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_more_of_anything_never_costs_less(worker: View, rng: Random, more: str) -> None:
    demand = replace(DEMAND, handoff_s=rng.choice([0.0, 0.5]))
    changes = {"queued_prompt_tokens": rng.randrange(3000), "running_seqs": rng.randrange(9)}
    held, decode = rng.randrange(900), worker(rng.choice([D, E]), "d", held=rng.randrange(900))
    before = cost(demand, worker(E, "p", held, **changes), decode, 1.0)
    match more:
        case "line":
            changes["queued_prompt_tokens"] += rng.randrange(1000)
        case "tokens":
            held -= rng.randint(0, held)
        case "hand-off":
            demand = replace(demand, handoff_s=demand.handoff_s + rng.random())
        case "streams":
            changes["running_seqs"] += rng.randrange(9)
    assert cost(demand, worker(E, "p", held, **changes), decode, 1.0).total_s >= before.total_s - 1e-9


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_few_workers_the_least_costly_pair_is_taken(worker: View, rng: Random) -> None:
    def some(role: Role, name: str) -> WorkerView:
        changes = {"queued_prompt_tokens": rng.choice([0, 900]), "running_seqs": rng.randrange(12)}
        return worker(role, name, rng.choice([0, 0, 400, 900]), **changes)

    prefills = [some(P, f"p{n}") for n in range(rng.randint(1, DRAWS))]
    decodes = [some(D, f"d{n}") for n in range(rng.randint(1, DECODE_DRAWS - 1))]
    elastic = [some(E, "e")] if len(prefills) < DRAWS and rng.random() < 0.7 else []
    pairs = [(p, d) for d in decodes + elastic for p in prefills + elastic if p is not d] + [(None, e) for e in elastic]
    placement = place(DEMAND, prefills + decodes + elastic, rng)
    totals = {(p and p.info, d.info): cost(DEMAND, p, d, 500.0).total_s for p, d in pairs}
    assert totals[placement.prefill, placement.decode] == min(totals.values())
