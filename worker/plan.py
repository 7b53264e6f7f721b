"""How the prompt tokens of one step are shared among the prompts that are being computed. Pure.

Each prompt takes all that it lacks, or what is left, in order of its turn (`worker.admission.turn_of`): short prompts
share a step, only the last one that gets tokens may be cut, and each prompt ends after a bounded number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.chunking import plan_chunks
from worker.admission import turn_of
from worker.request import Request


def share_tokens(
    prompts: Sequence[tuple[Request, int]], num_tokens: int, num_express_tokens: int = 0, *, by_rank: bool = False
) -> list[int]:
    """Returns the tokens of each prompt in the next step; 0 = none.

    `prompts`: each with the tokens that it lacks, at least one; with `by_rank`, in the order in which they are served.
    Up to `num_express_tokens` of the step's `num_tokens` go to the prompts that end with them, shortest first, before
    all others: a short prompt does not wait behind a long one whose turn it is.
    """
    shares = [0] * len(prompts)
    for at in sorted(range(len(prompts)), key=lambda at: prompts[at][1]) if num_express_tokens else ():
        if prompts[at][1] > num_express_tokens - sum(shares):
            break
        shares[at] = prompts[at][1]
    others = [at for at, share in enumerate(shares) if not share]
    if not by_rank:
        others.sort(key=lambda at: turn_of(*prompts[at]))
    chunks = plan_chunks([prompts[at][1] for at in others], num_tokens - sum(shares), len(others))
    for at, chunk in zip(others, chunks, strict=True):
        shares[at] = chunk
    return shares
