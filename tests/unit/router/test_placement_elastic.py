"""Where a prompt is computed that an elastic worker decodes, and what decode workers do when nobody else is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.fleet import Candidates
from router.handoff_times import HandoffTimes
from router.placement import Demand, Obstacle, Placement, WorkerView, place, readiness
from router.prefix_map import Prefix
from router.room import common_sequence, longest_sequence
from router.tuning import STREAM_WEIGHT
from router.workers import Workers
from tandem.errors import Unavailable
from tandem.types import Incarnation, PlacementReason, Role, TokenId

P, D, E = Role.PREFILL, Role.DECODE, Role.ELASTIC
DEMAND = Demand(num_tokens=1000, max_total_tokens=1100, num_prompt_tokens=1000)

View = Callable[..., WorkerView]


@pytest.fixture
def worker(view: View, load: Any) -> View:
    """A worker of 64 seats; `rate` of prompt tokens, other changes as of its heartbeat."""

    def make(
        role: Role,
        name: str,
        rate: float = 100.0,
        held: int = 0,
        local: int | None = None,
        **changes: Any,
    ) -> WorkerView:
        heartbeat = load(prompt_tokens_per_s=rate, **changes)
        heartbeat = replace(heartbeat, pool=replace(heartbeat.pool, total=4096, free=4096, live=0))
        info = {"max_seqs": 64, "max_sequence_tokens": 4096, "local_prefill_tokens": local}
        made = view(role, name, heartbeat, **info)
        return replace(made, reported_tokens=held, likely_tokens=held)

    return make


def outcome(workers: list[WorkerView], demand: Demand = DEMAND) -> tuple[str | None, str, PlacementReason]:
    """The only one there is, whatever is drawn."""
    rng = Random(1)
    found = {_named(place(demand, workers, rng)) for _ in range(30)}
    assert len(found) == 1
    return found.pop()


def _named(placement: Placement) -> tuple[str | None, str, PlacementReason]:
    prefill = None if placement.prefill is None else str(placement.prefill.worker_id)
    return prefill, str(placement.decode.worker_id), placement.reason


def test_a_prompt_stays_where_it_is_decoded_if_others_are_no_faster(worker: View) -> None:
    assert outcome([worker(E, "e")]) == (None, "e", PlacementReason.LOCAL_FASTER)
    assert outcome([worker(E, "e"), worker(P, "p")]) == (None, "e", PlacementReason.LOCAL_FASTER)
    assert outcome([worker(E, "e"), worker(P, "p", 0.0)]) == (None, "e", PlacementReason.LOCAL_FASTER), "not measured"


@pytest.mark.parametrize(
    ("rate", "queued", "handoff_s", "prefill"),
    [
        (1000.0, 0, 0.0, "p"),
        (1000.0, 0, 8.9, "p"),  # 1 s and 8.9 s there, 10 s here
        (1000.0, 0, 9.1, None),
        (1000.0, 8000, 0.9, "p"),
        (1000.0, 8000, 1.1, None),
        (99.0, 0, 0.0, None),
    ],
)
def test_it_goes_to_who_has_it_there_sooner(
    worker: View, rate: float, queued: int, handoff_s: float, prefill: str | None
) -> None:
    workers = [worker(E, "e"), worker(P, "p", rate, queued_prompt_tokens=queued)]
    reason = PlacementReason.REMOTE_FASTER if prefill else PlacementReason.LOCAL_FASTER
    assert outcome(workers, replace(DEMAND, handoff_s=handoff_s)) == (prefill, "e", reason)


def test_without_any_rate_tokens_are_compared(worker: View) -> None:
    workers = [worker(E, "e", 0.0, queued_prompt_tokens=5000), worker(P, "p", 0.0, queued_prompt_tokens=500)]
    assert outcome(workers) == ("p", "e", PlacementReason.REMOTE_FASTER)


def test_of_prefill_workers_the_one_that_is_done_first_is_taken(worker: View) -> None:
    slow, fast = worker(P, "slow", 100.0), worker(P, "fast", 400.0, queued_prompt_tokens=2000)
    assert outcome([slow, fast, worker(D, "d", local=0)]) == ("fast", "d", PlacementReason.REMOTE_STATIC)


def test_short_and_held_prompts_stay(worker: View) -> None:
    fast = worker(P, "p", 1e6)
    assert outcome([worker(E, "e", local=1000), fast]) == (None, "e", PlacementReason.LOCAL_SHORT)
    assert outcome([worker(E, "e", held=992), fast]) == (None, "e", PlacementReason.LOCAL_HELD)
    assert outcome([worker(D, "d", local=1000), fast]) == (None, "d", PlacementReason.LOCAL_SHORT)
    assert outcome([worker(D, "d", local=None), fast]) == (None, "d", PlacementReason.LOCAL_STATIC)


def test_a_prompt_that_was_not_held_after_all_goes_by_time(worker: View) -> None:
    demand = replace(DEMAND, local_if_held=False)
    assert outcome([worker(E, "e", held=992), worker(P, "p")], demand)[2] is PlacementReason.LOCAL_FASTER
    assert outcome([worker(E, "e", 1.0, held=992), worker(P, "p", 1e6)], demand)[2] is PlacementReason.REMOTE_FASTER


def test_a_worker_at_its_objective_comes_after_others(worker: View) -> None:
    full = worker(E, "at objective", step_s=0.05, step_objective_s=0.05)
    below = worker(E, "below", step_s=0.049, step_objective_s=0.05, running_seqs=60)
    without = worker(E, "without", step_s=0.05, running_seqs=61)
    assert {_named(place(DEMAND, [full, below], Random(n)))[1] for n in range(9)} == {"below"}
    assert {_named(place(DEMAND, [full, without], Random(n)))[1] for n in range(9)} == {"without"}
    assert outcome([full])[1] == "at objective"


def test_streams_join_others_and_leave_a_worker_free_for_prompts(worker: View) -> None:
    demand = Demand(num_tokens=8, max_total_tokens=20, num_prompt_tokens=8)
    workers = [worker(E, "streams", running_seqs=4), worker(E, "idle")]
    assert outcome(workers, demand) == ("idle", "streams", PlacementReason.REMOTE_FASTER)
    fixed = [worker(D, "streams", local=None, running_seqs=4), worker(D, "idle", local=None)]
    assert outcome(fixed, demand)[1] == "idle"


@pytest.mark.parametrize(
    "heartbeat",
    [
        {"running_seqs": 64},
        {"running_seqs": 1, "queued_prompt_tokens": 50_000},
        {"running_seqs": 2, "running_for_others": 2},
    ],
)
def test_streams_do_not_join_where_they_would_wait_or_nobody_streams(worker: View, heartbeat: dict[str, Any]) -> None:
    demand = Demand(num_tokens=8, max_total_tokens=20, num_prompt_tokens=8)
    workers = [worker(E, "other", **heartbeat), worker(E, "streams", running_seqs=1)]
    assert outcome(workers, demand)[1] == "streams"


def test_streams_are_spared_a_prompt_as_far_as_they_count(worker: View) -> None:
    """Beside n streams a prompt of 10 s costs n * 10 s * STREAM_WEIGHT more."""
    for streams in (1, 8):
        alone_s = 10 * (1 + STREAM_WEIGHT * streams)
        for queued, prefill in ((alone_s * 100 - 1100, "p"), (alone_s * 100 - 900, None)):
            crowded = worker(E, "e", running_seqs=streams)
            assert outcome([crowded, worker(P, "p", queued_prompt_tokens=int(queued))])[0] == prefill
    waiting, computing = worker(E, "e", waiting_seqs=8), worker(E, "e", running_seqs=8, running_for_others=8)
    for each in (waiting, computing):
        assert outcome([each, worker(P, "p", queued_prompt_tokens=100)])[0] is None, "no stream runs there"


def test_an_elastic_worker_never_hands_over_to_itself_and_no_suspect_is_asked(worker: View) -> None:
    slow, fast = worker(E, "e", 1.0), worker(P, "fast", 1e6)
    assert outcome([slow, fast]) == ("fast", "e", PlacementReason.REMOTE_FASTER)
    blamed = replace(DEMAND, blamed=frozenset({Incarnation("fast-life-1")}))
    assert outcome([slow, fast], blamed) == (None, "e", PlacementReason.LOCAL_FASTER)
    assert outcome([slow, replace(fast, burden=1)]) == (None, "e", PlacementReason.LOCAL_FASTER)


def test_what_an_elastic_worker_hands_over_is_not_computed_again(worker: View) -> None:
    source = replace(worker(E, "source"), obstacle=Obstacle.DRAINING)
    demand = replace(DEMAND, source=source.info)
    assert outcome([source, worker(E, "e")], demand) == ("source", "e", PlacementReason.MOVED)
    with pytest.raises(Unavailable, match="no decode worker can take it: source is draining"):
        place(demand, [source], Random(1))


def test_one_elastic_worker_is_a_cluster(worker: View) -> None:
    alone = [worker(E, "e", local=0)]
    assert readiness(alone) is None
    assert longest_sequence(alone, 4000) == common_sequence(alone, 4000) == 4096
    assert readiness([worker(D, "d", local=0), *alone]) is None, "it prefills for those of a fixed role"


def test_decode_workers_stand_in_for_prefill_workers_only_if_they_are_to(worker: View) -> None:
    decode, prefill = worker(D, "d", local=16), worker(P, "p")
    candidates = Candidates.of([decode, replace(prefill, obstacle=Obstacle.DRAINING)])
    with pytest.raises(Unavailable, match="no prefill worker can take it: p is draining"):
        place(DEMAND, candidates, Random(1))
    candidates.fleet.falls_back = True
    assert _named(place(DEMAND, candidates, Random(1))) == (None, "d", PlacementReason.LOCAL_FALLBACK)
    assert readiness(candidates) is None
    ready = Candidates.of([decode, prefill])
    ready.fleet.falls_back = True
    assert _named(place(DEMAND, ready, Random(1))) == ("p", "d", PlacementReason.REMOTE_STATIC)


@given(
    num_workers=st.integers(2, 6),
    num_choices=st.sampled_from([1, 3]),
    draining=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_work_given_all_at_once_is_packed_no_further_than_the_bound(
    workers: Workers, info: Any, load: Any, num_workers: int, num_choices: int, draining: bool, seed: int
) -> None:
    """As when sixteen requests come between two heartbeats. `workers` is a router's, with no stream to any."""
    for view in workers.views():
        workers.deregister(view.info)
    members = [info(E, f"e{number}", max_seqs=64, local_prefill_tokens=None) for number in range(num_workers)]
    for each in members:
        workers.heartbeat(each, load(prompt_tokens_per_s=500.0))
        link: Any = workers.link(each)
        link.connected = True
    if draining:
        workers.order_drain(members[0].worker_id)
    rng, seats = Random(seed), Counter[str]()
    prefix = Prefix("", tuple(map(TokenId, range(40))))
    for _ in range(8 * num_workers):
        num_tokens = rng.choice([40, 48])
        demand = Demand(num_tokens, num_tokens + 20, 40, num_choices, prefix=prefix)
        assignment = workers.place_now(demand)
        seats[assignment.placement.decode.worker_id] += num_choices
        assert not draining or members[0].incarnation not in assignment.placement.incarnations
    assert max(seats.values()) <= 64 + num_choices, "another worker is opened before streams wait"


def test_a_hand_off_is_expected_to_take_as_long_as_those_before_it() -> None:
    times = HandoffTimes()
    assert times.expected_s(100) == 0.0
    for _ in range(3):
        times.took(100, 0.02)
    assert times.expected_s(100) == pytest.approx(0.02)
    assert times.expected_s(1000) == pytest.approx(0.02), "nothing shows yet how it grows"
    for num_tokens in (200, 1000, 3000) * 30:
        times.took(num_tokens, 0.01 + num_tokens * 1e-4)
    assert times.expected_s(2000) == pytest.approx(0.21, rel=0.02)
    for num_tokens in (200, 1000, 3000) * 30:
        times.took(num_tokens, 0.5 - num_tokens * 1e-4)
    assert times.expected_s(10_000) > 0.3, "never faster for being longer"
