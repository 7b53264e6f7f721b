"""Chooses the pair of workers for a request: pure, given what is known of the workers.

Only pairs with equal model and layout fingerprints and a common transport count. Of these, only
the ones with the fewest workers that failed this request or are set aside for failing others
(see `ejection`). Decode is chosen first, then its partner, each as the least costly of a few: two at
random (Mitzenmacher 2001: near the best, and no herd on old figures), and two of those that hold the
most of the prompt's KV. Cost is load and the work that the prompt makes there, so that who holds a
popular prefix is not given more than that is worth:

    decode     share of its seats or blocks in use, whichever is larger; less `PREFIX_WORTH` if it holds the prompt
    prefill    prompt tokens that wait there, and those of this prompt that it has to compute

A short prompt may stay on the decode worker, and so may one of which it lacks no more than that.
Knows nothing of streams or time.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from random import Random
from typing import TypeAlias

from router.ejection import Pair
from router.prefix_map import Prefix
from tandem.errors import InvalidRequest, Unavailable
from tandem.types import GroupSpec, Incarnation, PrefixAt, Role, WorkerInfo, WorkerLoad

_MUST_EQUAL = ("model_fingerprint", "layout_fingerprint")
_kind_of = attrgetter(*_MUST_EQUAL, "transports")
"""Equal for workers that have the same partners."""

PREFIX_WORTH = 0.25
"""Share of a decode worker by which it may be fuller than others and still be taken, if it holds the whole prompt: what
it holds is neither computed nor moved again. A bound on how far a popular prefix draws load to one place."""
_NO_BURDENS: Mapping[Pair, int] = {}
_Rank: TypeAlias = tuple[int, int]
"""Of a worker or a pair, least first: in how many ways it is suspect; how often in a row it was set aside."""


class Obstacle(enum.StrEnum):
    """Why a worker takes no new work, whatever is asked of it; as people read it after its name."""

    STALLED = "is stalled"
    NOT_CONNECTED = "is not connected"
    NOT_HEARD = "has sent no heartbeat"
    DRAINING = "is draining"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What placement may know of one worker."""

    info: WorkerInfo
    load: WorkerLoad | None
    """Its last heartbeat; None = none yet."""
    obstacle: Obstacle | None = None
    """Why it takes no new work; None = it does."""
    assigned_tokens: int = 0
    """Tokens that this router gave it, and `load` does not show."""
    assigned_seqs: int = 0
    """Sequences of those."""
    burden: int = 0
    """0 = gets work like any other; else how often in a row it was set aside."""
    set_aside: str = ""
    """The same, for people; empty = it is not."""
    silence_s: float = 0.0
    """Time since it was last heard, without such in which this router stood still."""
    connected: bool = False
    """Whether this router's stream to it stands."""
    reported_tokens: int = 0
    """Leading tokens of the request to be placed whose KV it has said that it holds; one at least is left out."""
    likely_tokens: int = 0
    """The same, with those that it was given to compute and has not spoken of yet."""

    def share_with(self, demand: Demand) -> float:
        """Of its seats or of its pool, whichever is more, that is taken with `demand` there; > 1 = some wait."""
        if self.load is None:
            return 1.0
        pool, seats = self.load.pool, self.info.max_seqs
        num_seqs = self.load.running_seqs + self.load.waiting_seqs + self.assigned_seqs + demand.num_choices
        missing_blocks = -(-(self.queued_tokens + self.lacking_tokens(demand)) // max(1, pool.block_size))
        num_blocks = pool.total - pool.free - pool.cached + missing_blocks
        return max(num_seqs / seats if seats else 0.0, num_blocks / max(1, pool.total))

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait there."""
        return self.assigned_tokens + (0 if self.load is None else self.load.queued_prompt_tokens)

    def lacking_tokens(self, demand: Demand) -> int:
        """What it would have to compute or to be sent."""
        return demand.num_tokens - self.likely_tokens

    def decode_cost(self, demand: Demand) -> float:
        """Of decoding `demand` there. Nothing that it holds is worth waiting for a seat or room."""
        share = self.share_with(demand)
        worth = PREFIX_WORTH * min(1.0, self.likely_tokens / max(1, demand.num_prefix_tokens))
        return share - worth if share <= 1 else share

    def prefill_cost(self, demand: Demand) -> float:
        """Tokens that are computed there until the prompt is."""
        return self.queued_tokens + self.lacking_tokens(demand)

    @property
    def max_local_tokens(self) -> int:
        """Most tokens of a prompt that a decode worker is asked to compute if it holds the rest: a block at least."""
        block_size = 0 if self.load is None else self.load.pool.block_size
        return max(self.info.local_prefill_tokens or 0, block_size)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of the workers that run it."""

    num_tokens: int
    """Tokens to compute before the next one: prompt, and what was emitted before a replay."""
    max_total_tokens: int
    """Most tokens that one choice can come to."""
    num_prompt_tokens: int = 0
    num_choices: int = 1
    """They share the prompt's full blocks; a decode worker's pool must hold all else once for each."""
    blamed: frozenset[Incarnation] = frozenset()
    """Workers that failed this request: no more of them are taken than need be."""
    prefix: Prefix | None = None
    """Its tokens, to be looked for in caches; None = what is cached must not be used for it."""
    source: WorkerInfo | None = None
    """The decode worker that hands its KV over, in the place of a prefill worker; None = it is computed."""
    local_if_held: bool = True
    """Whether a decode worker that seems to hold nearly all of the prompt may be asked to compute the rest."""

    @property
    def num_prefix_tokens(self) -> int:
        """All that a prefill worker holds of it; of several choices, the prompt."""
        return self.num_prompt_tokens if self.num_choices > 1 else min(self.num_tokens, self.max_total_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs. `prefill`: who hands its KV over; None where the decode worker computes the prompt."""

    prefill: WorkerInfo | None
    decode: WorkerInfo
    max_local_tokens: int | None = None
    """Set where the decode worker computes the prompt because it seems to hold the rest: most tokens it may lack."""
    prefix_at: PrefixAt = PrefixAt.NOWHERE

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """Of its workers, prefill first."""
        return tuple(each.incarnation for each in (self.prefill, self.decode) if each is not None)


def place(
    demand: Demand, workers: Sequence[WorkerView], rng: Random, pair_burdens: Mapping[Pair, int] = _NO_BURDENS
) -> Placement:
    """The pair for `demand`. `pair_burdens`: as `WorkerView.burden`. Raises Unavailable that says what is missing."""
    prefills = _candidates(Role.PREFILL, demand, workers)
    decodes = _candidates(Role.DECODE, demand, workers)
    if demand.source is not None:
        prefills = [view for view in workers if view.info.incarnation == demand.source.incarnation]
        decodes = [view for view in decodes if view not in prefills]
    ranking = _Ranking(demand, prefills, pair_burdens)
    ranks = [(ranking.best_with(each), each) for each in decodes]
    best = min((rank for rank, _ in ranks if rank is not None), default=None)
    if best is None:
        raise Unavailable(_what_is_missing(demand, workers, prefills, decodes))
    contenders = [each for rank, each in ranks if rank == best]
    decode = _least_costly(contenders, lambda view: view.decode_cost(demand), rng)
    where = partial(_prefix_at, (*prefills, *decodes))
    if _is_local(demand, decode):
        return Placement(None, decode.info, prefix_at=where(decode))
    if _is_held(demand, decode):
        return Placement(None, decode.info, decode.max_local_tokens, where(decode))
    prefill = _least_costly(ranking.best_partners(decode), lambda view: view.prefill_cost(demand), rng)
    return Placement(prefill.info, decode.info, prefix_at=where(decode, prefill))


class _Ranking:
    """Of pairs, for one demand. Looks at each prefill worker once per kind of decode worker if no pair is set aside."""

    def __init__(self, demand: Demand, prefills: Sequence[WorkerView], pair_burdens: Mapping[Pair, int]) -> None:
        self._demand = demand
        self._prefills = prefills
        self._pair_burdens = pair_burdens
        self._burdened = {decode for _, decode in pair_burdens}
        self._partners: dict[object, tuple[list[WorkerView], _Rank | None]] = {}
        """By kind of decode worker: who fits it, and the best of their ranks."""

    def best_with(self, decode: WorkerView) -> _Rank | None:
        """That of the best pair with this decode worker; None if there is none."""
        own = self._rank(decode)
        if _is_local(self._demand, decode) or _is_held(self._demand, decode):
            return own
        partners, best = self._partners_of(decode)
        if decode.info.incarnation in self._burdened:
            best = min((self._pair_rank(each, decode) for each in partners), default=None)
        return None if best is None else _sum(own, best)

    def best_partners(self, decode: WorkerView) -> list[WorkerView]:
        """With which the rank is the best."""
        ranks = [(self._pair_rank(each, decode), each) for each in self._partners_of(decode)[0]]
        best = min(rank for rank, _ in ranks)
        return [each for rank, each in ranks if rank == best]

    def _partners_of(self, decode: WorkerView) -> tuple[list[WorkerView], _Rank | None]:
        kind = _kind_of(decode.info)
        if kind not in self._partners:
            partners = _partners(decode, self._prefills)
            self._partners[kind] = partners, min(map(self._rank, partners), default=None)
        return self._partners[kind]

    def _rank(self, view: WorkerView) -> _Rank:
        is_blamed = view.info.incarnation in self._demand.blamed
        return is_blamed + (view.burden > 0), view.burden

    def _pair_rank(self, prefill: WorkerView, decode: WorkerView) -> _Rank:
        burden = self._pair_burdens.get((prefill.info.incarnation, decode.info.incarnation), 0)
        return _sum(self._rank(prefill), (int(burden > 0), burden))


def _sum(one: _Rank, other: _Rank) -> _Rank:
    return one[0] + other[0], one[1] + other[1]


def _least_costly(views: Sequence[WorkerView], cost_of: Callable[[WorkerView], float], rng: Random) -> WorkerView:
    """Of two at random, and two of those that hold most; by chance if they are equal."""
    contenders = rng.sample(views, min(2, len(views)))
    most = max(view.likely_tokens for view in views)
    if most > 0:
        holders = [view for view in views if view.likely_tokens == most]
        contenders += rng.sample(holders, min(2, len(holders)))
    return min(contenders, key=cost_of)


def _prefix_at(workers: Iterable[WorkerView], *chosen: WorkerView) -> PrefixAt:
    if any(view.likely_tokens for view in chosen):
        return PrefixAt.CHOSEN
    return PrefixAt.ELSEWHERE if any(view.likely_tokens for view in workers) else PrefixAt.NOWHERE


def readiness(workers: Sequence[WorkerView]) -> str | None:
    """None if a prompt of any length could be placed now, else what is missing."""
    try:
        place(Demand(num_tokens=sys.maxsize, max_total_tokens=1), workers, Random(0))
    except Unavailable as error:
        return error.message
    return None


def longest_sequence(workers: Sequence[WorkerView], num_prompt_tokens: int, num_choices: int = 1) -> int | None:
    """Tokens of the longest choice, of so many, that any registered pair holds; None without a decode worker."""
    demand = Demand(num_prompt_tokens, num_prompt_tokens + 1, num_prompt_tokens, num_choices)
    prefills = [view for view in workers if view.info.role is Role.PREFILL]
    lengths: list[int] = []
    for decode in (view for view in workers if view.info.role is Role.DECODE):
        own = _choice_tokens(demand, decode)
        longest_prompt = max((each.info.max_sequence_tokens for each in _partners(decode, prefills)), default=own)
        is_bound = decode.info.local_prefill_tokens is not None and longest_prompt < num_prompt_tokens
        lengths.append(min(own, longest_prompt) if is_bound else own)
    return max(lengths, default=None)


def check_pools(group: GroupSpec, workers: Sequence[WorkerView]) -> None:
    """For a group of which one choice alone fits a pair. Raises InvalidRequest where no pair holds all of them."""
    longest = longest_sequence(workers, group.num_prompt_tokens, group.num_seqs)
    if longest is None or group.max_total_tokens <= longest:
        return
    bound, block_size = max(
        (view.info.pool_tokens, view.load.pool.block_size)
        for view in workers
        if view.info.role is Role.DECODE and view.load is not None
    )
    needed = group.max_pool_tokens(block_size)
    raise InvalidRequest(
        f"sampling.{group.seqs_option}",
        f"{group.num_seqs} sequences may need {needed} token slots, the largest KV pool has {bound}",
    )


def common_sequence(workers: Sequence[WorkerView], num_prompt_tokens: int, num_choices: int = 1) -> int | None:
    """Tokens of the longest choice, of so many, that all pairs hold which take such a prompt now; None if none does.

    A pair that leaves less than half as much room as the best does not count: to be served by
    it, too, is not worth so short a completion. The prefill worker counts as if it held the whole
    sequence: then it can compute it again, should the decode worker be lost.
    """
    demand = Demand(num_prompt_tokens, num_prompt_tokens + 1, num_prompt_tokens, num_choices)
    prefills = _candidates(Role.PREFILL, demand, workers)
    lengths: list[int] = []
    for decode in _candidates(Role.DECODE, demand, workers):
        partners = [decode] if _is_local(demand, decode) else _partners(decode, prefills)
        own = _choice_tokens(demand, decode)
        lengths += (min(own, _choice_tokens(demand, each)) for each in partners)
    least = max((max(lengths, default=0) + num_prompt_tokens) / 2, num_prompt_tokens + 1)
    return min((each for each in lengths if each >= least), default=None)


def _candidates(role: Role, demand: Demand, workers: Sequence[WorkerView]) -> list[WorkerView]:
    return [view for view in workers if view.info.role is role and _refusal(demand, view) is None]


def _refusal(demand: Demand, view: WorkerView) -> str | None:
    """Why this worker cannot serve `demand`, whatever its partner."""
    if view.obstacle is not None:
        return view.obstacle
    if view.info.role is Role.PREFILL:
        if demand.num_prefix_tokens > view.info.max_sequence_tokens:
            return f"holds prompts of {view.info.max_sequence_tokens} tokens, not {demand.num_prefix_tokens}"
        return None
    held = _choice_tokens(demand, view)
    if demand.max_total_tokens > held:
        shared = f" in each of {demand.num_choices} choices" if demand.num_choices > 1 else ""
        return f"holds sequences of {held} tokens{shared}, not {demand.max_total_tokens}"
    return None


def _choice_tokens(demand: Demand, view: WorkerView) -> int:
    """Most tokens that each choice of `demand` can come to on this worker, as `GroupSpec.max_pool_tokens` counts them.

    A prefill worker holds the prompt once, whatever the number of choices. A pool of unknown size is no bound.
    """
    block_size = 0 if view.load is None else view.load.pool.block_size
    is_bound = demand.num_choices > 1 and view.info.role is Role.DECODE and view.info.pool_tokens and block_size
    if not is_bound:
        return view.info.max_sequence_tokens
    num_shared = demand.num_prompt_tokens // block_size
    num_own = max(0, view.info.pool_tokens // block_size - num_shared) // demand.num_choices
    return min(view.info.max_sequence_tokens, (num_shared + num_own) * block_size)


def _is_local(demand: Demand, decode: WorkerView) -> bool:
    longest = decode.info.local_prefill_tokens
    if demand.source is not None:
        return False
    return longest is None or demand.num_tokens <= longest


def _is_held(demand: Demand, decode: WorkerView) -> bool:
    """Whether it holds so much of the prompt that it may compute the rest by itself."""
    lacking = demand.num_prefix_tokens - decode.reported_tokens
    return (
        demand.source is None
        and demand.local_if_held
        and decode.reported_tokens > 0
        and lacking <= decode.max_local_tokens
    )


def _partners(decode: WorkerView, prefills: Iterable[WorkerView]) -> list[WorkerView]:
    return [view for view in prefills if _difference(view.info, decode.info) is None]


def _difference(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """What keeps two workers from being a pair."""
    for name in _MUST_EQUAL:
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            return f"{name} differs: {prefill.worker_id} {ours}, {decode.worker_id} {theirs}"
    if not set(prefill.transports) & set(decode.transports):
        return (
            f"no common transport: {prefill.worker_id} {','.join(prefill.transports)}, "
            f"{decode.worker_id} {','.join(decode.transports)}"
        )
    return None


def _what_is_missing(
    demand: Demand, workers: Sequence[WorkerView], prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
) -> str:
    for role, able in ((Role.DECODE, decodes), (Role.PREFILL, prefills)):
        if able:
            continue
        refusals = [f"{view.info.worker_id} {_refusal(demand, view)}" for view in workers if view.info.role is role]
        return f"no {role} worker can take it: {'; '.join(refusals) or 'none is registered'}"
    differences = (_difference(prefill.info, decode.info) for decode in decodes for prefill in prefills)
    return f"no pair of workers fits: {'; '.join(filter(None, differences))}"
