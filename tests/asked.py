"""Requests as the planner of steps sees them: a rank and a group."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.group import Group
from tandem.types import ChoiceSpec, GroupSpec, RequestId, SamplingParams, TokenId
from worker.request import Rank

END = TokenId(9)
BLOCK_SIZE = 4


@dataclass(eq=False)
class Asked:
    """A request as plans see it."""

    rank: Rank
    group: Group
    came_after_tokens: int = 0
    num_overtaken: int = 0


def asked(
    number: int, num_prompt_tokens: int, *, n: int = 1, max_tokens: int = 99, priority: int = 0, emitted: int = 0
) -> Asked:
    spec = GroupSpec(
        RequestId(f"r{number}"),
        tuple(TokenId(1) for _ in range(num_prompt_tokens)),
        SamplingParams(max_tokens=max_tokens, end_token_ids=frozenset({END})),
        tuple(ChoiceSpec(index, (TokenId(1),) * emitted) for index in range(n)),
    )
    return Asked((-priority, number), Group(spec))


def leave_free(pool: BlockPool, num_blocks: int) -> None:
    pool.allocate(pool.num_free - num_blocks)
