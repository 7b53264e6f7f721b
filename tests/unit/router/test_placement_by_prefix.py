"""Where a request goes whose beginning is cached somewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.placement import Demand, Placement, WorkerView, place
from router.tuning import FULL_S
from tandem.types import Incarnation, PrefixAt, Role

P, D = Role.PREFILL, Role.DECODE
DEMAND = Demand(num_tokens=1000, max_total_tokens=1100, num_prompt_tokens=1000)

View = Callable[..., WorkerView]


@pytest.fixture
def worker(view: View, load: Any) -> View:
    """A worker of 64 seats that holds so many tokens of the request; `load` as of its heartbeat."""

    def make(role: Role, name: str, held: int = 0, *, expected: int = 0, local: int = 0, **changes: Any) -> WorkerView:
        heartbeat = load(**changes)
        heartbeat = replace(heartbeat, pool=replace(heartbeat.pool, total=1024, free=1024, live=0))
        made = view(role, name, heartbeat, max_seqs=64, max_sequence_tokens=4096, local_prefill_tokens=local)
        return replace(made, reported_tokens=held, likely_tokens=max(held, expected))

    return make


def placements(workers: list[WorkerView], demand: Demand = DEMAND, tries: int = 100) -> list[Placement]:
    rng = Random(1)
    return [place(demand, workers, rng) for _ in range(tries)]


def taken(workers: list[WorkerView], role: Role) -> Counter[str]:
    infos = ((each.prefill if role is P else each.decode) for each in placements(workers))
    return Counter(str(info.worker_id) for info in infos if info is not None)


@pytest.mark.parametrize("role", [P, D])
def test_of_many_idle_workers_the_one_that_holds_the_prefix_is_found(worker: View, role: Role) -> None:
    others = [worker(role, f"other {number}") for number in range(30)]
    partner = worker(D if role is P else P, "partner")
    assert set(taken([*others, worker(role, "holder", 512), partner], role)) == {"holder"}


@pytest.mark.parametrize(("queued", "winner"), [(511, "holder"), (513, "idle")])
def test_a_prefill_worker_is_worth_waiting_for_as_long_as_computing_takes_longer(
    worker: View, queued: int, winner: str
) -> None:
    holder = worker(P, "holder", 512, queued_prompt_tokens=queued)
    assert set(taken([holder, worker(P, "idle"), worker(D, "d")], P)) == {winner}


@pytest.mark.parametrize(("held", "streams", "winner"), [(992, 18, "holder"), (992, 20, "idle"), (496, 18, "idle")])
def test_a_decode_worker_may_be_fuller_by_what_the_hand_off_would_take(
    worker: View, held: int, streams: int, winner: str
) -> None:
    """A whole hand-off takes as long as a quarter of the seats costs: 16, and as many as the idle one's new blocks."""
    workers = [worker(P, "p"), worker(D, "idle"), worker(D, "holder", expected=held, running_seqs=streams)]
    found = placements(workers, replace(DEMAND, handoff_s=FULL_S / 4))
    assert {str(each.decode.worker_id) for each in found} == {winner}


def test_nothing_held_is_worth_waiting_for_a_seat(worker: View) -> None:
    full = worker(D, "full", expected=992, running_seqs=64)
    assert set(taken([full, worker(D, "busy", running_seqs=60), worker(P, "p")], D)) == {"busy"}


def test_those_who_hold_equally_much_share(worker: View) -> None:
    workers = [worker(P, f"p{number}", 512) for number in range(4)]
    shares = taken([*workers, worker(D, "d")], P)
    assert len(shares) == 4
    assert min(shares.values()) > 10


def test_only_blocks_that_a_decode_worker_lacks_take_up_room(worker: View) -> None:
    assert worker(D, "d").share_with(DEMAND) == pytest.approx(63 / 1024)
    assert worker(D, "d", 992).share_with(DEMAND) == pytest.approx(1 / 64)


@pytest.mark.parametrize(
    ("held", "local", "limit"),
    [
        (992, 0, 16),  # the rest is within one block
        (976, 0, None),
        (900, 100, 100),
        (896, 100, None),
    ],
)
def test_what_a_decode_worker_nearly_holds_it_completes_by_itself(
    worker: View, held: int, local: int, limit: int | None
) -> None:
    (placement,) = placements([worker(P, "p"), worker(D, "d", held, local=local)], tries=1)
    assert placement.max_local_tokens == limit
    assert (placement.prefill is None) is (limit is not None)
    assert placement.prefix_at is PrefixAt.CHOSEN


def test_only_what_was_reported_makes_a_prompt_local(worker: View) -> None:
    (placement,) = placements([worker(P, "p"), worker(D, "d", expected=992)], tries=1)
    assert placement.prefill is not None


def test_a_decode_worker_whose_cache_had_less_than_it_said_gets_a_partner(worker: View) -> None:
    workers = [worker(P, "p"), worker(D, "d", 992)]
    (placement,) = placements(workers, replace(DEMAND, local_if_held=False), tries=1)
    assert placement.prefill is not None
    assert placement.max_local_tokens is None


def test_of_several_choices_the_prompt_counts(worker: View) -> None:
    demand = Demand(1300, 1100, num_prompt_tokens=1000, num_choices=3)
    (placement,) = placements([worker(P, "p"), worker(D, "d", 992)], demand, tries=1)
    assert placement.prefill is None


def test_a_holder_that_failed_the_request_comes_last(worker: View) -> None:
    demand = replace(DEMAND, blamed=frozenset({Incarnation("holder-life-1")}))
    workers = [worker(P, "p"), worker(D, "holder", 992), worker(D, "other")]
    assert {each.decode.worker_id for each in placements(workers, demand)} == {"other"}


def test_it_is_told_where_the_prefix_was(worker: View) -> None:
    (nowhere,) = placements([worker(P, "p"), worker(D, "d")], tries=1)
    assert nowhere.prefix_at is PrefixAt.NOWHERE
    busy = worker(P, "holder", 512, queued_prompt_tokens=10_000)
    (elsewhere,) = placements([busy, worker(P, "idle"), worker(D, "d")], tries=1)
    assert elsewhere.prefix_at is PrefixAt.ELSEWHERE


@given(
    num_workers=st.integers(2, 8),
    skew=st.floats(0.0, 3.0),
    num_prefixes=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_popularity_of_prefixes_makes_a_hot_spot(
    worker: View, num_workers: int, skew: float, num_prefixes: int, seed: int
) -> None:
    """Of three rounds the middle one counts: two random choices spread now and then by more."""
    rng = Random(seed)
    weights = [1 / (rank + 1) ** skew for rank in range(num_prefixes)]
    lines, running = zip(*(spreads_at_once(worker, num_workers, weights, rng) for _ in range(3)), strict=True)
    assert max(lines) <= 6 * DEMAND.num_tokens
    assert median(running) <= 24, "a quarter of 64 seats, and what two random choices spread"


def spreads_at_once(worker: View, num_workers: int, weights: list[float], rng: Random) -> tuple[int, int]:
    """All requests come at once and nobody finishes any: load only grows, where locality puts it.

    Returns how far apart prefill workers' lines are, in tokens, and decode workers' streams.
    """
    queued: Counter[str] = Counter()
    seats: Counter[str] = Counter()
    holds: set[tuple[str, int]] = set()
    for _ in range(120):
        (prefix,) = rng.choices(range(len(weights)), weights)
        prefills = [
            worker(P, f"p{n}", expected=992 * ((f"p{n}", prefix) in holds), queued_prompt_tokens=queued[f"p{n}"])
            for n in range(num_workers)
        ]
        decodes = [
            worker(D, f"d{n}", expected=992 * ((f"d{n}", prefix) in holds), running_seqs=seats[f"d{n}"])
            for n in range(num_workers)
        ]
        placement = place(DEMAND, [*prefills, *decodes], rng)
        assert placement.prefill is not None
        name, decode = str(placement.prefill.worker_id), str(placement.decode.worker_id)
        queued[name] += 8 if (name, prefix) in holds else 1000
        seats[decode] += 1
        holds |= {(name, prefix), (decode, prefix)}
    lines = [queued[f"p{n}"] for n in range(num_workers)]
    running = [seats[f"d{n}"] for n in range(num_workers)]
    return max(lines) - min(lines), max(running) - min(running)
