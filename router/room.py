"""How long the sequences of a request may get, by what all workers together hold: pure.

Looks at groups of workers, not at each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.fleet import Candidates, Fleet, Kind, Room, candidates_of
from router.worker_set import WorkerSet
from router.worker_view import Demand, WorkerView
from tandem.errors import InvalidRequest
from tandem.types import GroupSpec

_Workers = Candidates | Sequence[WorkerView]


def longest_sequence(workers: _Workers, num_prompt_tokens: int, num_choices: int = 1) -> int | None:
    """Tokens of the longest choice, of so many, that any registered pair holds; None without a decode worker."""
    demand = Demand(num_prompt_tokens, num_prompt_tokens + 1, num_prompt_tokens, num_choices)
    fleet = candidates_of(workers).fleet
    lengths: list[int] = []
    for kind, rooms in fleet.groups.items():
        if not kind.role.decodes:
            continue
        own = max(room.choice_tokens(demand) for room in rooms)
        longest_prompt = max((room.max_sequence_tokens for room in _partner_rooms(fleet, kind)), default=own)
        is_bound = not (kind.computes_any or fleet.falls_back) and longest_prompt < num_prompt_tokens
        lengths.append(min(own, longest_prompt) if is_bound else own)
    return max(lengths, default=None)


def check_pools(group: GroupSpec, workers: _Workers) -> None:
    """For a group of which one choice alone fits a pair. Raises InvalidRequest where no pair holds all of them."""
    longest = longest_sequence(workers, group.num_prompt_tokens, group.num_seqs)
    if longest is None or group.max_total_tokens <= longest:
        return
    groups = candidates_of(workers).fleet.groups.items()
    rooms = (room for kind, rooms in groups if kind.role.decodes for room in rooms if room.block_size)
    bound, block_size = max((room.pool_tokens, room.block_size) for room in rooms)
    needed = group.max_pool_tokens(block_size)
    raise InvalidRequest(
        f"sampling.{group.seqs_option}",
        f"{group.num_seqs} sequences may need {needed} token slots, the largest KV pool has {bound}",
    )


def common_sequence(workers: _Workers, num_prompt_tokens: int, num_choices: int = 1) -> int | None:
    """Tokens of the longest choice, of so many, that all pairs hold which take such a prompt now; None if none does.

    A pair that leaves less than half as much room as the best does not count: to be served by
    it, too, is not worth so short a completion. The prefill worker counts as if it held the whole
    sequence: then it can compute it again, should the decode worker be lost.
    """
    demand = Demand(num_prompt_tokens, num_prompt_tokens + 1, num_prompt_tokens, num_choices)
    fleet = candidates_of(workers).fleet
    lengths: set[int] = set()
    for kind, rooms in fleet.groups.items():
        if not kind.role.decodes:
            continue
        own = {room.choice_tokens(demand) for room in _usable(fleet, rooms.items())}
        own = {each for each in own if each > num_prompt_tokens}
        is_short = kind.local_prefill_tokens is not None and num_prompt_tokens <= kind.local_prefill_tokens
        lengths |= own if kind.computes_any or is_short else _least_of_pairs(own, _prompt_lengths(fleet, kind, demand))
    least = max((max(lengths, default=0) + num_prompt_tokens) / 2, num_prompt_tokens + 1)
    return min((each for each in lengths if each >= least), default=None)


def _least_of_pairs(ones: set[int], others: set[int]) -> set[int]:
    """The lesser of each pair, as a set; without a walk over all pairs."""
    if not ones or not others:
        return set()
    bound = min(max(ones), max(others))
    return {each for each in ones | others if each <= bound}


def _prompt_lengths(fleet: Fleet, decode: Kind, demand: Demand) -> set[int]:
    """What partners hold that take such a prompt now."""
    kinds = (rooms for kind, rooms in fleet.groups.items() if kind.role.prefills and decode.fits(kind))
    held = {room.max_sequence_tokens for rooms in kinds for room in _usable(fleet, rooms.items())}
    return {each for each in held if each >= demand.num_prefix_tokens}


def _partner_rooms(fleet: Fleet, decode: Kind) -> Iterable[Room]:
    """Yields the rooms of all registered partners."""
    return (room for kind, rooms in fleet.groups.items() if kind.role.prefills and decode.fits(kind) for room in rooms)


def _usable(fleet: Fleet, rooms: Iterable[tuple[Room, WorkerSet]]) -> Iterable[Room]:
    return (room for room, workers in rooms if workers & fleet.usable)
