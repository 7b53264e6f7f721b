from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.placement import Demand, Obstacle, WorkerView, place, readiness
from router.room import check_pools, common_sequence, longest_sequence
from router.tuning import DECODE_DRAWS
from tandem.errors import InvalidRequest, Unavailable
from tandem.types import ChoiceSpec, GroupSpec, Incarnation, RequestId, Role, SamplingParams, TokenId

DEMAND = Demand(num_tokens=10, max_total_tokens=20)
P, D = Role.PREFILL, Role.DECODE


def names(workers: list[WorkerView], demand: Demand = DEMAND, tries: int = 50) -> Counter[tuple[str | None, str]]:
    rng = Random(1)
    found = [place(demand, workers, rng) for _ in range(tries)]
    return Counter((each.prefill and each.prefill.worker_id, each.decode.worker_id) for each in found)


def test_the_prefill_worker_with_the_fewest_queued_tokens_is_taken(view: Any, load: Any) -> None:
    workers = [view(P, "busy", load(queued_prompt_tokens=9)), view(P, "idle"), view(D, "d")]
    assert set(names(workers)) == {("idle", "d")}


def test_of_two_decode_workers_the_one_with_more_free_blocks_is_taken(view: Any, load: Any) -> None:
    workers = [view(P, "p"), view(D, "full", load(free=1)), view(D, "free", load(free=2))]
    assert set(names(workers)) == {("p", "free")}


def test_blocks_for_which_others_wait_are_not_free(view: Any, load: Any) -> None:
    besieged = view(D, "besieged", load(free=3, queued_prompt_tokens=16 * 5))
    assert set(names([view(P, "p"), besieged, view(D, "full", load(free=0))])) == {("p", "full")}


def test_of_many_decode_workers_the_fullest_are_never_taken_and_the_others_share(view: Any, load: Any) -> None:
    workers = [view(P, "p"), *(view(D, f"d{free}", load(free=free)) for free in range(1, 4 + DECODE_DRAWS))]
    taken = names(workers, tries=400)
    assert not {("p", f"d{free}") for free in range(1, DECODE_DRAWS)} & taken.keys()
    best = 3 + DECODE_DRAWS
    assert taken["p", f"d{best}"] > taken["p", f"d{best - 1}"] > taken["p", f"d{best - 2}"] > 0


def test_equal_workers_share_the_work(view: Any) -> None:
    taken = names([view(P, "p0"), view(P, "p1"), view(D, "d0"), view(D, "d1")], tries=400)
    assert len(taken) == 4
    assert min(taken.values()) > 60


def test_work_given_since_the_last_heartbeat_counts(view: Any, info: Any, load: Any) -> None:
    just_used = WorkerView(info(D, "used"), load(), assigned_tokens=17)
    assert set(names([view(P, "p"), just_used, view(D, "fresh")])) == {("p", "fresh")}


def test_a_short_prompt_stays_on_the_decode_worker_that_may_compute_it(view: Any) -> None:
    workers = [view(P, "p"), view(D, "d", local_prefill_tokens=10)]
    assert set(names(workers)) == {(None, "d")}
    assert set(names(workers, Demand(11, 20))) == {("p", "d")}


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"model_fingerprint": "x"}, "p and d: model_fingerprint differs, weights and x"),
        (
            {"layout_fingerprint": "x"},
            "p and d: layout_fingerprint differs, layout and x: give all the same --b",
        ),
        ({"transports": ("nccl",)}, "no common transport: p shm,tcp, d nccl"),
        ({"obstacle": Obstacle.DRAINING}, "no decode worker can take it: d is draining"),
        ({"max_sequence_tokens": 19}, "no decode worker can take it: d holds sequences of 19 tokens, not 20"),
    ],
)
def test_what_keeps_a_pair_from_serving_is_said(view: Any, changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(Unavailable, match=missing):
        names([view(P, "p"), view(D, "d", **changes)])


def test_a_prefill_worker_needs_room_for_what_it_computes_only(view: Any) -> None:
    just_enough = [view(P, "p", max_sequence_tokens=10), view(D, "d")]
    assert set(names(just_enough)) == {("p", "d")}
    resumed = Demand(40, 50, num_prompt_tokens=10, num_choices=3)
    assert set(names(just_enough, resumed)) == {("p", "d")}, "of several choices it computes the prompt"
    with pytest.raises(Unavailable, match="no prefill worker can take it: p holds prompts of 9 tokens, not 10"):
        names([view(P, "p", max_sequence_tokens=9), view(D, "d")])


@pytest.mark.parametrize(
    ("blamed", "taken"),
    [
        ({"d0"}, {("p0", "d1"), ("p1", "d1")}),
        ({"p0", "d0"}, {("p1", "d1")}),
        ({"p0", "p1", "d0"}, {("p0", "d1"), ("p1", "d1")}),
        ({"p0", "d0", "d1"}, {("p1", "d0"), ("p1", "d1")}),
        ({"p0", "p1", "d0", "d1"}, {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}),
    ],
)
def test_of_workers_that_failed_the_request_no_more_are_taken_than_need_be(
    view: Any, blamed: set[str], taken: set[tuple[str, str]]
) -> None:
    workers = [view(P, "p0"), view(P, "p1"), view(D, "d0"), view(D, "d1")]
    demand = Demand(10, 20, blamed=frozenset(Incarnation(f"{name}-life-1") for name in blamed))
    assert set(names(workers, demand)) == taken


def test_a_worker_that_failed_the_request_is_not_taken_for_being_the_emptiest(view: Any, load: Any) -> None:
    workers = [
        *(view(P, "p0"), view(P, "p1", load(queued_prompt_tokens=9))),
        *(view(D, "d0"), view(D, "d1", load(free=1))),
    ]
    demand = Demand(10, 20, blamed=frozenset({Incarnation("p0-life-1"), Incarnation("d0-life-1")}))
    assert set(names(workers, demand)) == {("p1", "d1")}


def test_ready_needs_a_pair_or_a_decode_worker_that_computes_any_prompt(view: Any) -> None:
    assert (
        readiness([])
        == "no decode worker can take it: none is registered; start one with --router and the address of this router"
    )
    assert readiness([view(P, "p")]) is not None
    assert readiness([view(D, "d", local_prefill_tokens=64)]) is not None
    assert readiness([view(D, "d", local_prefill_tokens=None)]) is None
    assert readiness([view(P, "p"), view(D, "d")]) is None


def test_the_longest_sequence_is_that_of_the_best_pair(view: Any) -> None:
    assert longest_sequence([view(P, "p")], 10) is None
    small, large = view(D, "d0", max_sequence_tokens=100), view(D, "d1", max_sequence_tokens=300)
    assert longest_sequence([view(P, "p", max_sequence_tokens=200), small, large], 10) == 300
    assert longest_sequence([view(P, "p", max_sequence_tokens=200), small, large], 200) == 300
    assert longest_sequence([view(P, "p", max_sequence_tokens=200), small, large], 201) == 200, "no prompt as long"
    assert longest_sequence([view(D, "d", max_sequence_tokens=300, local_prefill_tokens=None)], 10) == 300


@pytest.mark.parametrize(
    ("lengths", "common"),
    [
        ((200, 208), 200),
        ((208, 208), 208),
        ((110, 208), 208),  # a tenth of the room is not worth the choice of two
        ((155, 208), 155),
        ((100, 208), 208),
        ((90, 100), None),
        ((), None),
    ],
)
def test_the_common_length_is_what_pairs_hold_that_leave_room_enough(
    view: Any, lengths: tuple[int, ...], common: int | None
) -> None:
    decodes = [view(D, f"d{number}", max_sequence_tokens=each) for number, each in enumerate(lengths)]
    assert common_sequence([view(P, "p"), *decodes], num_prompt_tokens=100) == common


def test_the_common_length_is_that_of_pairs_which_take_work_now(view: Any) -> None:
    small, large = view(D, "d0", max_sequence_tokens=200), view(D, "d1", None, Obstacle.DRAINING)
    assert common_sequence([view(P, "p", max_sequence_tokens=150), large], 10) is None
    assert common_sequence([view(P, "p", max_sequence_tokens=10), small], 10) is None, "it could not be replayed"
    assert common_sequence([view(P, "p0"), view(P, "p1", max_sequence_tokens=150), small, large], 10) == 150
    assert common_sequence([view(D, "d", max_sequence_tokens=300, local_prefill_tokens=10), small], 10) == 300


def test_a_group_goes_only_where_the_pool_holds_all_its_choices(view: Any) -> None:
    small, large = (view(D, name, pool_tokens=16 * blocks) for name, blocks in (("small", 9), ("large", 10)))
    workers = [view(P, "p", pool_tokens=16), small, large]
    group = Demand(32, 64, num_prompt_tokens=32, num_choices=4)
    assert set(names(workers, group)) == {("p", "large")}
    assert set(names(workers, Demand(32, 64, num_prompt_tokens=32))) == {("p", "small"), ("p", "large")}
    with pytest.raises(Unavailable, match="small holds sequences of 48 tokens in each of 4 choices, not 64"):
        names([view(P, "p"), small], group)


def test_a_pool_of_unknown_size_is_no_bound(view: Any) -> None:
    workers = [view(P, "p"), view(D, "d", pool_tokens=0), view(D, "unheard", None, pool_tokens=16)]
    for decode in workers[1:]:
        group = Demand(32, 64, num_prompt_tokens=32, num_choices=16)
        assert set(names([workers[0], decode], group)) == {("p", decode.info.worker_id)}
    assert longest_sequence(workers, 32, 16) == common_sequence(workers, 32, 16) == 256


@given(st.integers(1, 100), st.integers(1, 8), st.integers(2, 16))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # `view` makes values
def test_the_longest_choice_is_the_longest_whose_group_fits_the_pool(
    view: Any, num_prompt_tokens: int, num_blocks: int, num_choices: int
) -> None:
    decode = view(D, "d", pool_tokens=16 * num_blocks * num_choices, max_sequence_tokens=10_000)
    longest = longest_sequence([view(P, "p", max_sequence_tokens=10_000), decode], num_prompt_tokens, num_choices)
    assert longest is not None

    def fits(num_tokens: int) -> bool:
        sampling = SamplingParams(max_tokens=num_tokens - num_prompt_tokens)
        prompt, choices = (TokenId(1),) * num_prompt_tokens, tuple(map(ChoiceSpec, range(num_choices)))
        return GroupSpec(RequestId("r"), prompt, sampling, choices).max_pool_tokens(16) <= decode.info.pool_tokens

    if longest > num_prompt_tokens:
        assert fits(longest)
    assert not fits(max(longest, num_prompt_tokens) + 1)


def test_choices_that_fit_no_pool_together_are_refused_as_too_many(view: Any, load: Any) -> None:
    workers = [view(D, "d", load(), pool_tokens=256, local_prefill_tokens=None)]

    def check(num_choices: int) -> None:
        choices = tuple(map(ChoiceSpec, range(num_choices)))
        check_pools(GroupSpec(RequestId("r"), (TokenId(1),) * 16, SamplingParams(max_tokens=100), choices), workers)

    check(2)
    with pytest.raises(InvalidRequest, match="1808 token slots, the largest KV pool has 256") as refused:
        check(16)
    assert refused.value.field == "sampling.n"


def test_a_full_worker_with_a_long_line_never_beats_an_idle_one(view: Any, load: Any) -> None:
    full = view(D, "full", load(running_seqs=64, waiting_seqs=900), max_seqs=64)
    idle = view(D, "idle", load(free=63), max_seqs=64)
    assert names([view(P, "p"), full, idle], tries=200) == {("p", "idle"): 200}


def test_seats_given_since_the_last_heartbeat_count(view: Any, info: Any, load: Any) -> None:
    used = WorkerView(info(D, "used", max_seqs=8), load(), assigned_seqs=7)
    running = view(D, "running", load(running_seqs=6), max_seqs=8)
    assert set(names([view(P, "p"), used, running])) == {("p", "running")}


def test_seats_and_blocks_are_weighed_by_what_is_scarcer(view: Any, load: Any) -> None:
    few_seats = view(D, "few seats", load(running_seqs=7), max_seqs=8)
    few_blocks = view(D, "few blocks", load(free=16), max_seqs=64)
    assert set(names([view(P, "p"), few_seats, few_blocks])) == {("p", "few blocks")}
    fewer_blocks = view(D, "fewer blocks", load(free=1), max_seqs=64)
    assert set(names([view(P, "p"), few_seats, fewer_blocks], Demand(30, 40))) == {("p", "few seats")}


def test_of_many_prefill_workers_the_most_loaded_is_never_taken_and_the_others_share(view: Any, load: Any) -> None:
    workers = [*(view(P, f"p{queued}", load(queued_prompt_tokens=queued)) for queued in (1, 2, 3, 4)), view(D, "d")]
    taken = names(workers, tries=400)
    assert ("p4", "d") not in taken
    assert taken["p1", "d"] > taken["p2", "d"] > taken["p3", "d"] > 0


def burdened(view: WorkerView, burden: int = 1) -> WorkerView:
    return replace(view, burden=burden)


def test_what_is_set_aside_gets_work_only_where_nobody_else_is_left(view: Any, load: Any) -> None:
    busy = load(free=1, queued_prompt_tokens=1000)
    well = [view(P, "p", busy), view(D, "d", busy)]
    aside = [burdened(view(P, "p'")), burdened(view(D, "d'"))]
    assert names([*well, *aside], tries=200) == {("p", "d"): 200}
    assert names([well[0], *aside], tries=200) == {("p", "d'"): 200}
    assert names(aside, tries=200) == {("p'", "d'"): 200}
    assert names([*aside, burdened(view(D, "worse"), 5)], tries=200) == {("p'", "d'"): 200}
    assert readiness(aside) is None


def test_a_pair_that_is_set_aside_leaves_both_to_others(view: Any) -> None:
    workers = [view(P, "p0"), view(P, "p1"), view(D, "d0"), view(D, "d1")]
    pairs = {(Incarnation("p0-life-1"), Incarnation("d0-life-1")): 1}
    rng = Random(1)
    found = [place(DEMAND, workers, rng, pairs) for _ in range(200)]
    taken = {(each.prefill and each.prefill.worker_id, each.decode.worker_id) for each in found}
    assert taken == {("p0", "d1"), ("p1", "d0"), ("p1", "d1")}
    only = place(DEMAND, [workers[0], workers[2]], rng, pairs)
    assert only.decode.worker_id == "d0"


def test_a_request_avoids_who_failed_it_before_who_failed_others(view: Any) -> None:
    workers = [view(P, "p"), view(D, "failed it"), burdened(view(D, "failed others"))]
    demand = Demand(10, 20, blamed=frozenset({Incarnation("failed it-life-1")}))
    assert set(names(workers, demand)) == {("p", "failed it")}  # as suspect, and not known to fail everybody
    assert set(names([*workers, view(D, "well")], demand)) == {("p", "well")}


def test_what_is_handed_over_goes_to_another_decode_worker_and_is_never_computed_there(view: Any) -> None:
    source = view(D, "source")
    holder = replace(view(D, "holder"), reported_tokens=9, likely_tokens=9)
    workers = [source, view(P, "p"), holder, view(D, "local", local_prefill_tokens=None)]
    assert set(names(workers, replace(DEMAND, source=source.info))) <= {("source", "holder"), ("source", "local")}


def test_what_is_handed_over_stays_where_no_other_decode_worker_fits(view: Any) -> None:
    source = view(D, "source")
    other = view(D, "other", layout_fingerprint="another")
    with pytest.raises(Unavailable, match="layout_fingerprint"):
        place(replace(DEMAND, source=source.info), [source, view(P, "p"), other], Random(1))


@pytest.mark.parametrize(
    ("draining", "num_free", "is_taken"), [(False, 64, True), (False, 15, False), (True, 15, True), (True, 0, True)]
)
def test_what_overload_hands_over_goes_only_where_there_is_room_to_spare(
    view: Any, draining: bool, num_free: int, is_taken: bool
) -> None:
    source, other = view(D, "source"), view(D, "other")
    source = replace(source, load=replace(source.load, draining=draining))
    pool = replace(other.load.pool, free=num_free, live=64 - num_free)
    other = replace(other, load=replace(other.load, pool=pool))
    demand = replace(DEMAND, num_tokens=1, source=source.info)
    if is_taken:
        assert place(demand, [source, other], Random(1)).decode.worker_id == "other"
    else:
        with pytest.raises(Unavailable, match="room to spare for what source runs"):
            place(demand, [source, other], Random(1))
