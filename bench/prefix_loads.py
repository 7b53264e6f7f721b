"""Three loads whose prompts begin alike: chats of several turns, few-shot prompts, one system prompt. Pure.

In each, every prompt that counts has `prompt_tokens` at most, and the share `reuse` of it was computed before: by the
chat's turn before it with its answer, or by the opening, which is asked once and does not count.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.peers.streams import Prompt, fresh_prompts

LOADS = ("multi-turn", "few-shot", "system prompt")
TURNS = 3
"""Of a chat, after the opening."""
TASKS = 4
"""Of few-shot prompts: each has examples of its own."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """How much is asked."""

    requests: int
    """That count."""
    prompt_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of all requests together, at most."""
        return self.requests * (self.prompt_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True)
class Talk:
    """Requests of one caller, one after the other."""

    opening: Prompt
    additions: tuple[Prompt, ...]
    """Each is asked behind the opening; in a chat, behind all prompts and answers before it."""
    is_chat: bool


def talks(load: str, shape: LoadShape, reuse: float, vocab_size: int, seed: int) -> list[Talk]:
    """The same for the same arguments. Raises ValueError if the turns of a chat do not fit into its prompts."""
    rng = random.Random(f"{seed}/{load}/{reuse}")
    if load == "multi-turn":
        return [_chat(rng, shape, reuse, vocab_size) for _ in range(-(-shape.requests // TURNS))]
    num_shared = round(reuse * shape.prompt_tokens)
    openings = fresh_prompts(rng, TASKS if load == "few-shot" else 1, num_shared, vocab_size)
    own = fresh_prompts(rng, shape.requests, shape.prompt_tokens - num_shared, vocab_size)
    return [Talk(openings[index % len(openings)], (each,), is_chat=False) for index, each in enumerate(own)]


def _chat(rng: random.Random, shape: LoadShape, reuse: float, vocab_size: int) -> Talk:
    """Its last prompt is the longest."""
    num_tokens, sizes = shape.prompt_tokens, list[int]()
    for _ in range(TURNS):
        num_known = round(reuse * num_tokens)
        sizes.append(num_tokens - num_known)
        num_tokens = num_known - shape.output_tokens
    if num_tokens < 1:
        raise ValueError(f"{TURNS} turns with reuse {reuse:.0%} do not fit into {shape.prompt_tokens} tokens")
    (opening,) = fresh_prompts(rng, 1, num_tokens, vocab_size)
    additions = [fresh_prompts(rng, 1, size, vocab_size)[0] for size in reversed(sizes)]
    return Talk(opening, tuple(additions), is_chat=True)
