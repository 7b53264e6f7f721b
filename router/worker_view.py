"""What placement knows of one worker, and what a request needs: plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router.prefix_map import Prefix
from router.serving_set import SetId
from tandem.types import Incarnation, WorkerInfo, WorkerLoad


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
    assigned_prompt_tokens: int = 0
    """Of `assigned_tokens`, what it computes itself."""
    ended_seqs: int = 0
    """Sequences of this router that have ended there since `load`, which shows most of them still."""

    def share_with(self, demand: Demand) -> float:
        """Of its seats or of its pool, whichever is more, that is taken with `demand` there; > 1 = some wait."""
        if self.load is None:
            return 1.0
        pool, seats = self.load.pool, self.info.max_seqs
        num_seqs = self.num_seqs + demand.num_choices
        num_tokens = self.assigned_tokens + self.load.queued_prompt_tokens + self.lacking_tokens(demand)
        missing_blocks = -(-num_tokens // max(1, pool.block_size))
        num_blocks = pool.num_used + missing_blocks
        return max(num_seqs / seats if seats else 0.0, num_blocks / max(1, pool.total))

    @property
    def is_draining(self) -> bool:
        """Whether it said that it drains."""
        return self.load is not None and self.load.draining

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait there to be computed."""
        return self.assigned_prompt_tokens + (0 if self.load is None else self.load.queued_prompt_tokens)

    def lacking_tokens(self, demand: Demand) -> int:
        """What it would have to compute or to be sent."""
        return demand.num_tokens - self.likely_tokens

    @property
    def running_seqs(self) -> int:
        """Streams that wait for their next tokens: prompts computed for other workers are none."""
        if self.load is None:
            return 0
        return max(0, self.load.running_seqs - self.load.running_for_others - self.ended_seqs)

    @property
    def num_seqs(self) -> int:
        """That it has, or was given."""
        waiting = 0 if self.load is None else self.load.waiting_seqs - self.load.waiting_for_others
        return self.assigned_seqs + self.running_seqs + waiting

    @property
    def is_at_objective(self) -> bool:
        """Whether one more stream there would make the others wait longer for a token than they should."""
        return self.load is not None and 0 < self.load.step_objective_s <= self.load.step_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """How fast it computes prompts now; 0 = not measured."""
        return 0.0 if self.load is None else self.load.prompt_tokens_per_s

    def line_s(self, unmeasured: float) -> float:
        """Returns the time until the prompts that wait there are computed; `unmeasured`: as `cost` has it."""
        return self.queued_tokens / (self.prompt_tokens_per_s or unmeasured)

    def compute_s(self, demand: Demand, unmeasured: float) -> float:
        """Returns the time in which the worker computes what it lacks of the prompt."""
        return self.lacking_tokens(demand) / (self.prompt_tokens_per_s or unmeasured)

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
    handoff_s: float = 0.0
    """How long it should take to hand its KV over; 0 = not known."""
    set_id: SetId | None = None
    """The set of equal workers that it needs; None = any."""

    @property
    def num_prefix_tokens(self) -> int:
        """All that a prefill worker holds of it; of several choices, the prompt."""
        return self.num_prompt_tokens if self.num_choices > 1 else min(self.num_tokens, self.max_total_tokens)
