"""Chooses the pair of workers for a request: pure, given what is known of the workers.

Only pairs of one set of equal workers (see `serving_set`) with a common transport count, of which each holds its part.
Of these, only the ones with the fewest workers that failed this request or are set aside for failing others
(see `ejection`). A fixed decode worker computes the prompts that its options say; an elastic one computes any, or
leaves it to a partner. A few decode workers are looked at, alone and with a few partners each: at random, and of those
that hold most of the prompt's KV. The least costly one is taken (see `cost`); there is no rule beside it.

Looks at groups of workers, as sets of bits, and at a handful of them: the time it takes grows far less than their
number, but with that of the workers that are under suspicion. Knows nothing of streams or time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from random import Random
from typing import NamedTuple, TypeAlias

from router.cost import cost
from router.ejection import Pair
from router.fleet import Candidates, Kind, candidates_of, difference, room_of
from router.serving_set import SetId
from router.tuning import DECODE_DRAWS, DRAWS, NOMINAL_TOKENS_PER_S, SPARE_SHARE
from router.worker_set import WorkerSet, draw, members
from router.worker_view import Demand, Obstacle, WorkerView
from tandem.errors import Unavailable
from tandem.types import Incarnation, PlacementReason, PrefixAt, Role, WorkerInfo

__all__ = [
    "Demand",
    "Obstacle",
    "Placement",
    "PlacementReason",
    "Search",
    "WorkerView",
    "place",
    "readiness",
    "ready_seats",
]

_NO_BURDENS: Mapping[Pair, int] = {}
_Rank: TypeAlias = tuple[int, int]
"""Of a worker or a pair, least first: in how many ways it is suspect; how often in a row it was set aside."""
_CLEAN: _Rank = (0, 0)
_MOST_NAMED = 8
"""Workers that an error names: it must fit into a gRPC trailer."""
_ANY_PROMPT, _SHORT_PROMPT = (Demand(num_tokens=each, max_total_tokens=1) for each in (sys.maxsize, 1))

NO_WORKER = "none is registered; start one with --router and the address of this router"
"""And what to do then."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs. `prefill`: who hands its KV over; None where the decode worker computes the prompt."""

    prefill: WorkerInfo | None
    decode: WorkerInfo
    max_local_tokens: int | None = None
    """Set where the decode worker computes the prompt because it seems to hold the rest: most tokens it may lack."""
    prefix_at: PrefixAt = PrefixAt.NOWHERE
    reason: PlacementReason = PlacementReason.REMOTE_STATIC
    """Why the prompt is computed where it is."""

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """Of its workers, prefill first."""
        return tuple(each.incarnation for each in (self.prefill, self.decode) if each is not None)


def place(
    demand: Demand,
    workers: Candidates | Sequence[WorkerView],
    rng: Random,
    pair_burdens: Mapping[Pair, int] = _NO_BURDENS,
) -> Placement:
    """The pair for `demand`. `pair_burdens`: as `WorkerView.burden`. Raises Unavailable that says what is missing."""
    search = Search(demand, candidates_of(workers), pair_burdens)
    contenders = search.decodes()
    if not contenders:
        raise Unavailable(search.what_is_missing())
    options = list(search.options(contenders, rng))
    rates = (view.prompt_tokens_per_s for option in options for view in option.views)
    unmeasured = max(rates) or NOMINAL_TOKENS_PER_S
    best = min(options, key=lambda each: cost(demand, each.prefill, each.decode, unmeasured).total_s)
    prefill, decode, reason = best
    is_relief = demand.source is not None and not best.views[0].is_draining
    if is_relief and decode.share_with(demand) > SPARE_SHARE:
        source = best.views[0].info.worker_id
        raise Unavailable(f"no decode worker seems to have room to spare for what {source} runs")
    most_tokens = decode.max_local_tokens if reason is PlacementReason.LOCAL_HELD else None
    computing = None if prefill is None else prefill.info
    return Placement(computing, decode.info, most_tokens, search.prefix_at(*best.views), reason)


class Option(NamedTuple):
    """Workers on which a request may run. `prefill` None = the decode worker computes the prompt."""

    prefill: WorkerView | None
    decode: WorkerView
    reason: PlacementReason

    @property
    def views(self) -> tuple[WorkerView, ...]:
        """Views of its workers, prefill first."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Search:
    """Of workers for one demand. Only those under suspicion are looked at one by one."""

    def __init__(self, demand: Demand, candidates: Candidates, pair_burdens: Mapping[Pair, int]) -> None:
        self._demand = demand
        self._candidates = candidates
        self._blamed = candidates.numbers(demand.blamed)
        self._suspects = self._blamed | candidates.numbers(candidates.burdened)
        self._pair_burdens = pair_burdens
        self._view = cache(candidates.view)
        self._known_draws: dict[WorkerSet, list[int]] = {}
        self._paired = candidates.numbers(decode for _, decode in pair_burdens)
        self._decodes = self._able(Role.DECODE)
        self._prefills = self._able(Role.PREFILL)
        if demand.source is not None:
            source = candidates.numbers([demand.source.incarnation])
            self._prefills = {candidates.fleet.kind(each): source for each in members(source)}
            self._decodes = {kind: workers & ~source for kind, workers in self._decodes.items()}

    def decodes(self) -> WorkerSet:
        """Who may decode it: those of the best rank, with the best of their partners."""
        ranks: dict[_Rank, WorkerSet] = {}
        for kind, able in self._decodes.items():
            alone, partners = self._alone(kind, able), self._partners(kind)
            for each in members(able & (self._suspects | self._paired)):
                rank: _Rank | None = self._rank(each)
                if not alone >> each & 1:
                    best = self._best(partners, each)
                    rank = None if best is None else _sum(self._rank(each), best[0])
                if rank is not None:
                    ranks[rank] = ranks.get(rank, 0) | 1 << each
            plain = able & ~(self._suspects | self._paired)
            if plain & alone:
                ranks[_CLEAN] = ranks.get(_CLEAN, 0) | plain & alone
            if plain & ~alone and (best := self._best(partners)) is not None:
                ranks[best[0]] = ranks.get(best[0], 0) | plain & ~alone
        if ranks:
            return ranks[min(ranks)]
        return self._fallback()

    def partners_of(self, decode: int) -> WorkerSet:
        """Who may compute it for `decode`: those of the best rank; for who can do without, only if that is clean."""
        kind = self._candidates.fleet.kind(decode)
        best = self._best(self._partners(kind) & ~(1 << decode), decode)
        if best is None or (kind.computes_any and self._demand.source is None and best[0] != _CLEAN):
            return 0
        return best[1]

    def options(self, decodes: WorkerSet, rng: Random) -> Iterator[Option]:
        """Yields some of these workers alone, as they may be, and with some partners; equal ones in random order."""
        for decode in self._drawn(decodes, DECODE_DRAWS, rng):
            view, reason = self._view(decode), self._reason_to_stay(decode)
            is_elastic = view.info.role is Role.ELASTIC and self._demand.source is None
            if reason is not None or is_elastic:
                yield Option(None, view, reason or PlacementReason.LOCAL_FASTER)
            if reason is not None:
                continue
            reason = PlacementReason.REMOTE_FASTER if is_elastic else PlacementReason.REMOTE_STATIC
            reason = reason if self._demand.source is None else PlacementReason.MOVED
            for each in self._drawn(self.partners_of(decode), DRAWS, rng):
                yield Option(self._view(each), view, reason)

    def _drawn(self, workers: WorkerSet, at_most: int, rng: Random) -> list[int]:
        """Returns a few at random, and some of those that hold most of the prompt; for the same set the same ones."""
        if workers not in self._known_draws:
            self._known_draws[workers] = draw(workers, at_most, rng)
            self._known_draws[workers] += draw(self._candidates.held.most(workers), DRAWS, rng)
        return self._known_draws[workers]

    def _reason_to_stay(self, decode: int) -> PlacementReason | None:
        """Returns why this decode worker computes the prompt, whoever else there is; None = others may."""
        if self._demand.source is not None:
            return None
        kind = self._candidates.fleet.kind(decode)
        if kind.computes_any and kind.role is not Role.ELASTIC:
            return PlacementReason.LOCAL_STATIC
        if self._is_short(kind):
            return PlacementReason.LOCAL_SHORT
        if self._held_enough(kind, 1 << decode):
            return PlacementReason.LOCAL_HELD
        is_without = not self._partners(kind) and kind.role is not Role.ELASTIC
        return PlacementReason.LOCAL_FALLBACK if is_without else None

    def prefix_at(self, *chosen: WorkerView) -> PrefixAt:
        """Where KV of the first tokens seems to be."""
        if any(view.likely_tokens for view in chosen):
            return PrefixAt.CHOSEN
        able = _union(self._prefills.values()) | _union(self._decodes.values())
        return PrefixAt.ELSEWHERE if self._candidates.held.most(able) else PrefixAt.NOWHERE

    def what_is_missing(self) -> str:
        """For people, where there are no `decodes`."""
        for role, able in ((Role.DECODE, self._decodes), (Role.PREFILL, self._prefills)):
            if not _union(able.values()):
                return f"no {role} worker can take it: {self._refusals(role) or NO_WORKER}"
        firsts = [
            [next(self._candidates.views(workers)) for workers in able.values() if workers]
            for able in (self._decodes, self._prefills)
        ]
        differences = (difference(prefill.info, decode.info) for decode in firsts[0] for prefill in firsts[1])
        return f"no pair of workers fits: {'; '.join(islice(filter(None, differences), _MOST_NAMED))}"

    def _able(self, role: Role) -> dict[Kind, WorkerSet]:
        """Who takes new work of this role and has room for it."""
        fleet = self._candidates.fleet
        able: dict[Kind, WorkerSet] = {}
        for kind, rooms in fleet.groups.items():
            if not _does(kind.role, role) or self._demand.set_id not in (None, kind.set_id):
                continue
            workers = 0
            for room, each in rooms.items():
                wanted = self._demand.num_prefix_tokens if role is Role.PREFILL else self._demand.max_total_tokens
                held = room.max_sequence_tokens if role is Role.PREFILL else room.choice_tokens(self._demand)
                workers |= each if wanted <= held else 0
            able[kind] = workers & fleet.usable
        return able

    def _fallback(self) -> WorkerSet:
        """Decode workers of the best rank, to compute the prompt because nobody else is there to do it."""
        if self._demand.source is not None or not self._candidates.fleet.falls_back:
            return 0
        best = self._best(_union(self._decodes.values()))
        return 0 if best is None else best[1]

    def _alone(self, kind: Kind, able: WorkerSet) -> WorkerSet:
        """Who of this kind can do without a partner."""
        if self._demand.source is not None:
            return 0
        return able if kind.computes_any or self._is_short(kind) else self._held_enough(kind, able)

    def _is_short(self, kind: Kind) -> bool:
        return kind.local_prefill_tokens is not None and self._demand.num_tokens <= kind.local_prefill_tokens

    def _held_enough(self, kind: Kind, workers: WorkerSet) -> WorkerSet:
        """Who of them holds so much of the prompt that it may compute the rest by itself."""
        if not self._demand.local_if_held:
            return 0
        found: WorkerSet = 0
        for room, each in self._candidates.fleet.groups[kind].items():
            most_lacking = max(kind.local_prefill_tokens or 0, room.block_size)
            wanted = max(1, self._demand.num_prefix_tokens - most_lacking)
            found |= self._candidates.held.reported(wanted, workers & each)
        return found

    def _partners(self, kind: Kind) -> WorkerSet:
        return _union(workers for each, workers in self._prefills.items() if kind.fits(each))

    def _best(self, workers: WorkerSet, decode: int | None = None) -> tuple[_Rank, WorkerSet] | None:
        """Those of the best rank, and that; as partners of `decode`, if it is given."""
        burdens = self._burdens_with(decode)
        odd = self._suspects | self._candidates.numbers(burdens)
        if workers & ~odd:
            return _CLEAN, workers & ~odd
        ranks: dict[_Rank, WorkerSet] = {}
        for each in members(workers):
            burden = burdens.get(self._candidates.view(each).info.incarnation, 0)
            rank = _sum(self._rank(each), (int(burden > 0), burden))
            ranks[rank] = ranks.get(rank, 0) | 1 << each
        return min(ranks.items()) if ranks else None

    def _burdens_with(self, decode: int | None) -> Mapping[Incarnation, int]:
        """Of the pairs that this decode worker is in, by the other one."""
        if decode is None or not self._paired >> decode & 1:
            return {}
        name = self._candidates.view(decode).info.incarnation
        return {prefill: burden for (prefill, each), burden in self._pair_burdens.items() if each == name}

    def _rank(self, number: int) -> _Rank:
        if not self._suspects >> number & 1:
            return _CLEAN
        burden = self._candidates.view(number).burden
        return (self._blamed >> number & 1) + (burden > 0), burden

    def _refusals(self, role: Role) -> str:
        """Why the first few workers of this role cannot serve it, whatever their partners."""
        groups = self._candidates.fleet.groups.items()
        workers = _union(_union(rooms.values()) for kind, rooms in groups if _does(kind.role, role))
        named = islice(self._candidates.views(workers), _MOST_NAMED)
        texts = [f"{view.info.worker_id} {self._refusal(role, view)}" for view in named]
        others = workers.bit_count() - len(texts)
        return "; ".join([*texts, f"and {others} more"] if others else texts)

    def _refusal(self, role: Role, view: WorkerView) -> str | None:
        demand = self._demand
        if demand.set_id is not None and (unlike := SetId.of(view.info).difference(demand.set_id)):
            return f"is set apart: {unlike}"
        if view.obstacle is not None:
            return view.obstacle
        if role is Role.PREFILL:
            return f"holds prompts of {view.info.max_sequence_tokens} tokens, not {demand.num_prefix_tokens}"
        shared = f" in each of {demand.num_choices} choices" if demand.num_choices > 1 else ""
        return f"holds sequences of {room_of(view).choice_tokens(demand)} tokens{shared}, not {demand.max_total_tokens}"


def readiness(workers: Candidates | Sequence[WorkerView], set_id: SetId | None = None) -> str | None:
    """None if a prompt of any length could be placed now, on that set if one is given, else what is missing."""
    search = Search(replace(_ANY_PROMPT, set_id=set_id), candidates_of(workers), _NO_BURDENS)
    return None if search.decodes() else search.what_is_missing()


def ready_seats(candidates: Candidates) -> dict[SetId, int]:
    """Returns the seats of each set whose workers could serve a prompt of any length now; 0 if they could not.

    If none could, of short prompts. What failed lately counts too: each router knows that of its own requests alone.
    """
    candidates = replace(candidates, burdened={})
    seats: dict[SetId, int] = {}
    for demand in (_ANY_PROMPT, _SHORT_PROMPT):
        seats = {kind.set_id: 0 for kind in candidates.fleet.groups}
        for each in seats:
            decodes = Search(replace(demand, set_id=each), candidates, _NO_BURDENS).decodes()
            for rooms in candidates.fleet.groups.values():
                seats[each] += sum((decodes & those).bit_count() * max(1, room.seats) for room, those in rooms.items())
        if any(seats.values()):
            break
    return seats


def _does(role: Role, work: Role) -> bool:
    return role.prefills if work is Role.PREFILL else role.decodes


def _sum(one: _Rank, other: _Rank) -> _Rank:
    return one[0] + other[0], one[1] + other[1]


def _union(sets: Iterable[WorkerSet]) -> WorkerSet:
    union: WorkerSet = 0
    for each in sets:
        union |= each
    return union
