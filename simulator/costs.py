"""What a worker's steps, hand-offs and messages cost: a few numbers, fitted to a measured machine and kept as JSON.

    step_s = base + per_seq * decodes + per_context_token * their context
                  + per_prompt_token * prompt tokens + per_prompt_context * (prompt tokens * context before each)

It is linear in its numbers, so least squares finds them; none is negative. Relative errors count, since a short step
matters as much to its streams as a long one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.step import ScheduledSeq
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes."""

    decodes: int
    context_tokens: int
    """That the decodes attend to, all together."""
    prompt_tokens: int
    prompt_context: int
    """For each prompt token the tokens before it, all together."""

    @classmethod
    def of(cls, seqs: Sequence[ScheduledSeq]) -> StepWork:
        """That of a scheduled step."""
        decodes = context = prompts = before = 0
        for seq in seqs:
            length = len(seq.token_ids)
            if length == 1:
                decodes += 1
                context += seq.context_len
            else:
                prompts += length
                before += length * seq.context_len + length * (length - 1) // 2
        return cls(decodes, context, prompts, before)

    @property
    def terms(self) -> tuple[float, ...]:
        """What the numbers of `StepCosts` multiply, in order."""
        return 1.0, self.decodes, self.context_tokens, self.prompt_tokens, self.prompt_context


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds."""

    base: float
    per_seq: float = 0.0
    per_context_token: float = 0.0
    per_prompt_token: float = 0.0
    per_prompt_context: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        return (
            self.base
            + self.per_seq * work.decodes
            + self.per_context_token * work.context_tokens
            + self.per_prompt_token * work.prompt_tokens
            + self.per_prompt_context * work.prompt_context
        )


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many times as long each part of a step takes while one other worker of the same host computes."""

    decode: float = 1.0
    prompt: float = 1.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """One worker, and what lies between it and others."""

    step: StepCosts
    decode_step: StepCosts | None = None
    """Of a worker of the fixed role decode, where it has other hardware (or cores) than the others; None = `step`."""
    sharing: Sharing = Sharing()
    workers_per_host: int = 1
    threads: int = 1
    """With which the steps were measured."""
    block_size: int = 16
    pool_blocks: int = 4096
    max_seqs: int = 64
    chunk_tokens: int = 512
    prefill_chunk_tokens: int = 512
    kv_bytes_per_token: int = 0
    handoff_s: float = 0.001
    """Of an empty hand-off: opening and commit."""
    handoff_bytes_per_s: float = 1e9
    message_s: float = 0.001
    """From router to worker, or back."""
    source: str = ""
    """Where the figures are from, for people."""

    @property
    def max_sequence_tokens(self) -> int:
        """The whole pool."""
        return self.pool_blocks * self.block_size

    def document(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.document(), indent=2) + "\n")


def read_costs(path: Path) -> CostModel:
    """What `CostModel.write` wrote. Raises ConfigError."""
    try:
        document = json.loads(path.read_text())
        step, decode_step = (
            None if document.get(name) is None else StepCosts(**document[name]) for name in ("step", "decode_step")
        )
        if step is None:
            raise ValueError("no step")
        sharing = Sharing(**document.get("sharing", {}))
        return CostModel(**{**document, "step": step, "decode_step": decode_step, "sharing": sharing})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError("--cost-model", f"cannot read {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs, and how far measured steps are from them."""

    costs: StepCosts
    median_error: float = field(default=0.0)
    """Relative."""


def fit(samples: Sequence[tuple[StepWork, float]]) -> Fit:
    """Least squares over (work, seconds), no number negative."""
    terms = np.array([work.terms for work, _ in samples], dtype=np.float64)
    seconds = np.array([each for _, each in samples], dtype=np.float64)
    weighted = terms / seconds[:, None]
    free = [column for column in range(terms.shape[1]) if weighted[:, column].any()]
    while True:
        found = np.linalg.lstsq(weighted[:, free], np.ones(len(samples)), rcond=None)[0]
        if (found >= 0).all():
            break
        del free[int(found.argmin())]
    numbers = np.zeros(terms.shape[1])
    numbers[free] = found
    errors = np.abs(terms @ numbers / seconds - 1)
    return Fit(StepCosts(*numbers.tolist()), float(np.median(errors)))


def served(costs: StepCosts, added_s: float, prompt_factor: float) -> StepCosts:
    """Each step `added_s` longer, prompts' numbers times `prompt_factor`."""
    return replace(
        costs,
        base=costs.base + added_s,
        per_prompt_token=prompt_factor * costs.per_prompt_token,
        per_prompt_context=prompt_factor * costs.per_prompt_context,
    )
