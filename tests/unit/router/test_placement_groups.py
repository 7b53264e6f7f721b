"""Placement by groups of workers against its plain definition, which looks at every pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.ejection import Pair
from router.fleet import Candidates, difference, room_of
from router.placement import Demand, Obstacle, Search, WorkerView, place
from router.prefix_map import Prefix, PrefixIndex, PrefixMap
from router.room import common_sequence, longest_sequence
from router.tuning import SPARE_SHARE
from router.worker_set import WorkerSet, draw, members
from tandem.errors import Unavailable
from tandem.types import Incarnation, PlacementReason, Role, TokenId

P, D, E = Role.PREFILL, Role.DECODE, Role.ELASTIC


class Plain:
    """What `Search` finds, by looking at all workers one by one."""

    def __init__(
        self, demand: Demand, views: Sequence[WorkerView], burdens: Mapping[Pair, int], falls_back: bool
    ) -> None:
        self.demand, self.views, self.burdens, self.falls_back = demand, views, burdens, falls_back
        source = demand.source and demand.source.incarnation
        self.prefills = [view for view in views if view.info.role.prefills and self._takes(view, P)]
        self.able = [view for view in views if view.info.role.decodes and self._takes(view, D)]
        if source is not None:
            self.prefills = [view for view in views if view.info.incarnation == source]
            self.able = [view for view in self.able if view.info.incarnation != source]

    def decodes(self) -> set[Incarnation]:
        ranks = {view.info.incarnation: rank for view in self.able for rank in [self._best(view)] if rank}
        if not ranks and self.falls_back and self.demand.source is None:
            ranks = {view.info.incarnation: self._rank(view) for view in self.able}
        return {each for each, rank in ranks.items() if rank == min(ranks.values())}

    def partners_of(self, decode: WorkerView) -> set[Incarnation]:
        ranks = {view.info.incarnation: rank for view, rank in self._pairs(decode)}
        best = min(ranks.values(), default=None)
        can_do_without = self.demand.source is None and _computes_any(decode)
        return set() if can_do_without and best != (0, 0) else {each for each, rank in ranks.items() if rank == best}

    def _best(self, decode: WorkerView) -> tuple[int, ...] | None:
        if self._alone(decode):
            return self._rank(decode)
        return min((_sum(self._rank(decode), rank) for _, rank in self._pairs(decode)), default=None)

    def _pairs(self, decode: WorkerView) -> Iterator[tuple[WorkerView, tuple[int, ...]]]:
        for view in self.prefills:
            if view is not decode and difference(view.info, decode.info) is None:
                burden = self.burdens.get((view.info.incarnation, decode.info.incarnation), 0)
                yield view, _sum(self._rank(view), (int(burden > 0), burden))

    def _alone(self, view: WorkerView) -> bool:
        local, demand = view.info.local_prefill_tokens, self.demand
        is_held = view.reported_tokens and demand.num_prefix_tokens - view.reported_tokens <= view.max_local_tokens
        is_short = _computes_any(view) or (local is not None and demand.num_tokens <= local)
        return demand.source is None and bool(is_short or (demand.local_if_held and is_held))

    def _rank(self, view: WorkerView) -> tuple[int, ...]:
        return (view.info.incarnation in self.demand.blamed) + (view.burden > 0), view.burden

    def _takes(self, view: WorkerView, work: Role) -> bool:
        if work is P:
            fits = self.demand.num_prefix_tokens <= view.info.max_sequence_tokens
        else:
            fits = self.demand.max_total_tokens <= room_of(view).choice_tokens(self.demand)
        return view.obstacle is None and fits


def _computes_any(view: WorkerView) -> bool:
    return view.info.role is E or (view.info.role is D and view.info.local_prefill_tokens is None)


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))


def fleet_of(view: Any, load: Any, rng: Random) -> list[WorkerView]:
    """Up to nine workers of all sorts."""
    views = []
    for number in range(rng.randint(1, 9)):
        role = rng.choice([P, D, E])
        heartbeat = load(free=rng.randint(1, 64), queued_prompt_tokens=rng.choice([0, 50, 500]))
        made = view(
            *(role, f"{role}{number}", heartbeat, rng.choice([None] * 5 + [Obstacle.DRAINING])),
            model_fingerprint=rng.choice("aaaab"),
            transports=rng.choice([("shm", "tcp"), ("tcp",), ("nccl",)]),
            local_prefill_tokens=None if role is P else rng.choice([None, 0, 0, 40]),
            max_sequence_tokens=rng.choice([100, 200, 300]),
            pool_tokens=rng.choice([0, 256, 1024]),
        )
        held = rng.choice([0, 0, 16, 64, 80])
        changes = {
            "reported_tokens": held,
            "likely_tokens": rng.choice([held, 80]),
            "burden": rng.choice([0] * 5 + [1, 2]),
        }
        views.append(replace(made, **changes))
    return views


@given(st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_finds_whom_the_plain_definition_finds(view: Any, load: Any, rng: Random, falls_back: bool) -> None:
    views = fleet_of(view, load, rng)
    names = [each.info.incarnation for each in views]
    burdens = {(rng.choice(names), rng.choice(names)): rng.randint(1, 2) for _ in range(rng.choice([0, 0, 1, 3]))}
    demand = Demand(
        num_tokens=(num_tokens := rng.choice([30, 90, 150])),
        max_total_tokens=num_tokens + rng.choice([1, 50]),
        num_prompt_tokens=num_tokens,
        num_choices=rng.choice([1, 1, 3]),
        blamed=frozenset(each for each in names if rng.random() < 0.2),
        source=rng.choice([None, None, None, next((each.info for each in views if each.info.role.decodes), None)]),
        local_if_held=rng.random() < 0.8,
    )
    plain = Plain(demand, views, burdens, falls_back)
    candidates = Candidates.of(views)
    candidates.fleet.falls_back = falls_back
    search = Search(demand, candidates, burdens)

    def named(workers: WorkerSet) -> set[Incarnation]:
        return {each.info.incarnation for each in candidates.views(workers)}

    assert named(search.decodes()) == plain.decodes()
    for number in members(search.decodes()):
        assert named(search.partners_of(number)) == plain.partners_of(views[number])
    try:
        placement = place(demand, candidates, rng, burdens)
    except Unavailable:
        able = [each for each in views if each.info.incarnation in plain.decodes()]
        overloaded = [each for each in views if each.info is demand.source and not each.is_draining]
        assert not able or (overloaded and any(each.share_with(demand) > SPARE_SHARE for each in able))
        return
    assert placement.decode.incarnation in plain.decodes()
    decode = next(each for each in views if each.info is placement.decode)
    if placement.prefill is not None:
        assert placement.prefill.incarnation in plain.partners_of(decode)
    elif placement.reason is PlacementReason.LOCAL_FALLBACK:
        assert falls_back
    else:
        assert plain._alone(decode)


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lengths_are_those_of_all_pairs(view: Any, load: Any, rng: Random) -> None:
    views, num_tokens, num_choices = fleet_of(view, load, rng), rng.choice([30, 90, 150]), rng.choice([1, 3])
    demand = Demand(num_tokens, num_tokens + 1, num_tokens, num_choices)
    plain = Plain(demand, views, {}, falls_back=False)

    def own(each: WorkerView) -> int:
        return room_of(each).choice_tokens(demand)

    longest, lengths = [], []
    for each in views:
        if each.info.role.decodes:
            fits = [p for p in views if p.info.role.prefills and difference(p.info, each.info) is None]
            prompt = max((p.info.max_sequence_tokens for p in fits), default=own(each))
            longest.append(min(own(each), prompt) if not _computes_any(each) and prompt < num_tokens else own(each))
    for each in plain.able:
        is_short = each.info.local_prefill_tokens is not None and num_tokens <= each.info.local_prefill_tokens
        partners = [p.info.max_sequence_tokens for p in plain.prefills if difference(p.info, each.info) is None]
        lengths += [min(own(each), p) for p in ([own(each)] if _computes_any(each) or is_short else partners)]
    least = max((max(lengths, default=0) + num_tokens) / 2, num_tokens + 1)
    assert longest_sequence(views, num_tokens, num_choices) == max(longest, default=None)
    assert common_sequence(views, num_tokens, num_choices) == min((n for n in lengths if n >= least), default=None)


@given(st.sets(st.integers(0, 2000)), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_set_gives_its_members_in_order_and_some_at_random(numbers: set[int], size: int, rng: Random) -> None:
    workers = sum(1 << each for each in numbers)
    assert list(members(workers)) == sorted(numbers)
    some = draw(workers, size, rng)
    assert len(some) == len(set(some)) == min(size, len(numbers))
    assert numbers.issuperset(some)


def test_each_member_is_drawn_equally_often() -> None:
    workers, rng = sum(1 << each for each in (0, 3, 64, 999)), Random(1)
    drawn = [draw(workers, 1, rng)[0] for _ in range(4000)]
    assert min(drawn.count(each) for each in (0, 3, 64, 999)) > 850


def _forget_gaps(maps: Sequence[PrefixMap], hashes: Sequence[int], now_s: float) -> None:
    """Both find ends by halving: a cache has no block without those before it."""
    for each in maps:
        seems = [name in each._reported or each._expected.get(name, now_s) > now_s for name in hashes]
        if seems != sorted(seems, reverse=True):
            each.forget()


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_index_says_what_the_maps_of_all_workers_say(rng: Random) -> None:
    index, maps, now_s = PrefixIndex(), [PrefixMap() for _ in range(4)], 0.0
    prefix = Prefix("", tuple(map(TokenId, range(7 * 16 + 5))))
    prefix._hashes[16] = hashes = list(range(100, 107))
    for number, each in enumerate(maps):
        each.join(index, number)
    for _ in range(30):
        number = rng.randrange(4)
        held, upto = maps[number], rng.randint(0, 7)
        reported = held.num_reported(hashes)
        match rng.randrange(6):
            case 0:
                held.change(hashes[:upto], [], cleared=rng.random() < 0.2)
            case 1:
                held.change([], hashes[upto:], cleared=False)
            case 2 | 3:
                held.expect(hashes[held.num_likely(hashes, reported, now_s) : upto], now_s)
            case 4:
                now_s += rng.choice([1.0, 20.0, 40.0])
            case _:
                held.forget()
        _forget_gaps(maps, hashes, now_s)
        found = index.held(prefix, [16], now_s)
        likely = [each.num_likely(hashes, each.num_reported(hashes), now_s) for each in maps]
        for among in (0b1111, 0b0110, 0b1000):
            most = max(likely[each] for each in members(among))
            expected = sum(1 << each for each in members(among) if likely[each] == most) if most else 0
            assert found.most(among) == expected
        for num_tokens in (1, 16, 17, 112):
            holders = sum(1 << each for each in range(4) if 16 * maps[each].num_reported(hashes) >= num_tokens)
            assert found.reported(num_tokens, 0b1111) == holders
    assert index.num_telling == sum(each.tells for each in maps)
    for each in maps:
        each.leave()
    assert not index.reported._sets
    assert not index.expected._sets
    assert index.num_telling == 0
