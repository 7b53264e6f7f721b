"""All workers as placement sees them from afar: numbered, and grouped by what they fit and how much they hold.

What a group says holds for each of its workers, so that a request looks at groups, of which there are few, and
then at a handful of workers. `Candidates` is what one placement is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from router.serving_set import SetId
from router.worker_set import WorkerSet, members
from router.worker_view import Demand, WorkerView
from tandem.types import Incarnation, Role, WorkerInfo


class Kind(NamedTuple):
    """Workers of one kind have the same partners, and compute the same prompts by themselves."""

    role: Role
    set_id: SetId
    transports: tuple[str, ...]
    local_prefill_tokens: int | None

    @classmethod
    def of(cls, info: WorkerInfo) -> Kind:
        """That of a worker."""
        return cls(info.role, SetId.of(info), info.transports, info.local_prefill_tokens)

    @property
    def computes_any(self) -> bool:
        """Whether the worker decodes, and computes prompts of any length for itself."""
        return self.role is Role.ELASTIC or (self.role.decodes and self.local_prefill_tokens is None)

    def fits(self, prefill: Kind) -> bool:
        """Whether a worker of kind `prefill` may hand KV over to a worker of this kind."""
        return self.set_id == prefill.set_id and not set(self.transports).isdisjoint(prefill.transports)


class Room(NamedTuple):
    """How much a worker holds."""

    max_sequence_tokens: int
    pool_tokens: int
    block_size: int
    """0 = not known yet."""
    seats: int
    """Sequences in its batch at most; 0 = not known."""

    def choice_tokens(self, demand: Demand) -> int:
        """Most tokens that each choice of `demand` can come to where it decodes, as `GroupSpec.max_pool_tokens` counts.

        A pool of unknown size is no bound.
        """
        if not (demand.num_choices > 1 and self.pool_tokens and self.block_size):
            return self.max_sequence_tokens
        num_shared = demand.num_prompt_tokens // self.block_size
        num_own = max(0, self.pool_tokens // self.block_size - num_shared) // demand.num_choices
        return min(self.max_sequence_tokens, (num_shared + num_own) * self.block_size)


def room_of(view: WorkerView) -> Room:
    """That of a worker."""
    block_size = 0 if view.load is None else view.load.pool.block_size
    return Room(view.info.max_sequence_tokens, view.info.pool_tokens, block_size, view.info.max_seqs)


class Fleet:
    """Workers by number, kind and room; and which of them take new work. A number is used again once it is free."""

    def __init__(self, *, falls_back: bool = False) -> None:
        """`falls_back`: whether decode workers compute every prompt as long as no prefill worker is ready."""
        self.falls_back = falls_back
        self.usable: WorkerSet = 0
        """Without obstacle."""
        self.groups: dict[Kind, dict[Room, WorkerSet]] = {}
        self._numbers: dict[Incarnation, int] = {}
        self._places: dict[int, tuple[Kind, Room]] = {}
        self._free: list[int] = []

    def add(self, info: WorkerInfo, room: Room) -> int:
        """Adds a worker, not usable yet; returns its number."""
        number = heappop(self._free) if self._free else len(self._places)
        self._numbers[info.incarnation] = number
        self._put(number, Kind.of(info), room)
        return number

    def change(self, number: int, room: Room, *, usable: bool) -> bool:
        """Updates a worker. Returns whether anything changed."""
        kind, before = self._places[number]
        was_usable = bool(self.usable >> number & 1)
        if room != before:
            self._take(number)
            self._put(number, kind, room)
        if usable is not was_usable:
            self.usable ^= 1 << number
        return room != before or usable is not was_usable

    def remove(self, info: WorkerInfo) -> None:
        """Removes a worker that is gone."""
        number = self._numbers.pop(info.incarnation)
        self._take(number)
        self.usable &= ~(1 << number)
        heappush(self._free, number)

    def number(self, incarnation: Incarnation) -> int | None:
        """Returns the worker's number; None if the worker is not here."""
        return self._numbers.get(incarnation)

    def kind(self, number: int) -> Kind:
        """That of a worker."""
        return self._places[number][0]

    def block_sizes(self) -> set[int]:
        """Block sizes that are known."""
        return {room.block_size for rooms in self.groups.values() for room in rooms if room.block_size}

    def _put(self, number: int, kind: Kind, room: Room) -> None:
        rooms = self.groups.setdefault(kind, {})
        rooms[room] = rooms.get(room, 0) | 1 << number
        self._places[number] = kind, room

    def _take(self, number: int) -> None:
        kind, room = self._places.pop(number)
        rooms = self.groups[kind]
        rooms[room] &= ~(1 << number)
        if not rooms[room]:
            del rooms[room]
        if not rooms:
            del self.groups[kind]


class Held(Protocol):
    """Which workers hold how much of a prompt."""

    def most(self, among: WorkerSet) -> WorkerSet:
        """Who of them seems to hold the most of it, if anybody holds any."""

    def reported(self, num_tokens: int, among: WorkerSet) -> WorkerSet:
        """Who of them has said that it holds at least so many tokens."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """All workers that one placement may look at."""

    fleet: Fleet
    view: Callable[[int], WorkerView]
    """Returns the view of a worker, by its number, for the request to be placed."""
    held: Held
    burdened: Mapping[Incarnation, int]
    """Workers that have a burden, with the burden of their views."""

    @classmethod
    def of(cls, views: Sequence[WorkerView]) -> Candidates:
        """Builds candidates of all `views`; looks at each view."""
        fleet = Fleet()
        for each in views:
            fleet.change(fleet.add(each.info, room := room_of(each)), room, usable=each.obstacle is None)
        burdened = {each.info.incarnation: each.burden for each in views if each.burden}
        return cls(fleet, views.__getitem__, _HeldInViews(views), burdened)

    def numbers(self, incarnations: Iterable[Incarnation]) -> WorkerSet:
        """Returns the numbers of those incarnations that are here."""
        found: WorkerSet = 0
        for number in map(self.fleet.number, incarnations):
            found |= 0 if number is None else 1 << number
        return found

    def views(self, workers: WorkerSet) -> Iterator[WorkerView]:
        """Yields the workers' views."""
        return map(self.view, members(workers))


def candidates_of(workers: Candidates | Sequence[WorkerView]) -> Candidates:
    """`workers` themselves, or made of a few views."""
    return workers if isinstance(workers, Candidates) else Candidates.of(workers)


class _HeldInViews:
    """Holdings as views tell them; every view is looked at."""

    def __init__(self, views: Sequence[WorkerView]) -> None:
        self._views = views

    def most(self, among: WorkerSet) -> WorkerSet:
        tokens = {number: self._views[number].likely_tokens for number in members(among)}
        most = max(tokens.values(), default=0)
        return _set_of(number for number, held in tokens.items() if held == most) if most else 0

    def reported(self, num_tokens: int, among: WorkerSet) -> WorkerSet:
        return _set_of(each for each in members(among) if self._views[each].reported_tokens >= num_tokens)


def _set_of(numbers: Iterable[int]) -> WorkerSet:
    return sum(1 << number for number in numbers)


def difference(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """What keeps two workers from being a pair."""
    if unlike := SetId.of(prefill).difference(SetId.of(decode)):
        return f"{prefill.worker_id} and {decode.worker_id}: {unlike}"
    if not set(prefill.transports) & set(decode.transports):
        return (
            f"no common transport: {prefill.worker_id} {','.join(prefill.transports)}, "
            f"{decode.worker_id} {','.join(decode.transports)}: leave --transport out on both, or give both the same"
        )
    return None
