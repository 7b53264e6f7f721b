"""Which prompts run, and how many tokens of each the next step computes. Pure: no clock, no I/O.

Owns the order of prompts; reads their progress, never writes it; blocks and the engine are
the worker's (it allocates for `Plan.admitted` and steps `Plan.chunks`).

    WAITING → RUNNING      `plan` admits it: all blocks of the prompt fit now
       └─────────┴→ gone   `remove`, in any state

All blocks of a prompt are taken at admission, so running prompts never wait for each other
and a step always makes progress. Order is priority, then arrival; a prompt that does not
fit may be overtaken by those that do. Nobody starves: each prompt is overtaken at most
`max_overtakes` times, then it goes first and everybody else waits for it.

Up to half of a step's tokens go to the prompts that they suffice to end, shortest first, so
that a short prompt does not wait behind a long one; the rest goes by order of admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.chunking import plan_chunks

MAX_OVERTAKES = 64
"""Later prompts that may be admitted before an earlier one."""


class Schedulable(Protocol):
    """What the scheduler must know of a prompt. Identity is what makes it one."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the whole prompt takes."""
        ...

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens not computed yet; at least 1 until the prompt is removed."""
        ...

    @property
    def priority(self) -> int:
        """Larger goes first."""
        ...


P = TypeVar("P", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[P]):
    """`num_tokens` more tokens of one prompt."""

    prompt: P
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan(Generic[P]):
    """One step: prompts that begin to run (blocks are theirs from now on), and what is computed."""

    admitted: tuple[P, ...]
    chunks: tuple[Chunk[P], ...]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Caps of one step."""

    chunk_tokens: int
    max_seqs: int
    max_overtakes: int = MAX_OVERTAKES


class _Entry(Generic[P]):
    """A prompt in line: when it came, and how many later ones went before it."""

    __slots__ = ("arrival", "num_overtaken", "prompt")

    def __init__(self, prompt: P, arrival: int) -> None:
        self.prompt = prompt
        self.arrival = arrival
        self.num_overtaken = 0


class PrefillScheduler(Generic[P]):
    """Waiting and running prompts of one worker."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._waiting: list[_Entry[P]] = []
        self._running: list[_Entry[P]] = []
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts with blocks that are not computed to their end."""
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(entry.prompt.num_remaining_tokens for entry in (*self._waiting, *self._running))

    def add(self, prompt: P) -> None:
        """Puts a prompt in line."""
        self._waiting.append(_Entry(prompt, self._num_arrived))
        self._num_arrived += 1

    def remove(self, prompt: P) -> None:
        """Forgets a prompt, computed or given up. Idempotent."""
        self._waiting = [entry for entry in self._waiting if entry.prompt is not prompt]
        self._running = [entry for entry in self._running if entry.prompt is not prompt]

    def plan(self, num_free_blocks: int) -> Plan[P]:
        """Admits what fits into `num_free_blocks`, then shares the token budget among all that run."""
        admitted = self._admit(num_free_blocks)
        return Plan(admitted, self._share_budget())

    def _admit(self, num_free_blocks: int) -> tuple[P, ...]:
        admitted: list[P] = []
        while len(self._running) < self._limits.max_seqs:
            entry = self._next_fitting(num_free_blocks)
            if entry is None:
                break
            self._waiting.remove(entry)
            self._running.append(entry)
            for other in self._waiting:
                if other.arrival < entry.arrival:
                    other.num_overtaken += 1
            num_free_blocks -= entry.prompt.num_blocks
            admitted.append(entry.prompt)
        return tuple(admitted)

    def _next_fitting(self, num_free_blocks: int) -> _Entry[P] | None:
        overdue = next((e for e in self._waiting if e.num_overtaken >= self._limits.max_overtakes), None)
        if overdue is not None:  # in order of arrival, so it is the oldest of them
            return overdue if overdue.prompt.num_blocks <= num_free_blocks else None
        fitting = [entry for entry in self._waiting if entry.prompt.num_blocks <= num_free_blocks]
        return min(fitting, key=_rank, default=None)

    def _share_budget(self) -> tuple[Chunk[P], ...]:
        # In order of admission: the oldest always advances, whatever priorities come after it.
        prompts = [entry.prompt for entry in self._running]
        remaining = [prompt.num_remaining_tokens for prompt in prompts]
        express = _express(remaining, self._limits.chunk_tokens // 2)
        rest = [index for index in range(len(prompts)) if index not in express]
        budget_tokens = self._limits.chunk_tokens - sum(remaining[index] for index in express)
        chunks = plan_chunks([remaining[index] for index in rest], budget_tokens, self._limits.max_seqs)
        shares = dict(zip(rest, chunks, strict=True)) | {index: remaining[index] for index in express}
        return tuple(Chunk(prompt, shares[i]) for i, prompt in enumerate(prompts) if shares[i] > 0)


def _express(remaining: Sequence[int], budget_tokens: int) -> frozenset[int]:
    """Which prompts can be computed to their end within `budget_tokens`, shortest first."""
    indices = []
    for index in sorted(range(len(remaining)), key=lambda index: (remaining[index], index)):
        if remaining[index] > budget_tokens:
            break
        budget_tokens -= remaining[index]
        indices.append(index)
    return frozenset(indices)


def _rank(entry: _Entry[P]) -> tuple[int, int]:
    return (-entry.prompt.priority, entry.arrival)
