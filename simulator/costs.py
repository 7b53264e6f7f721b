"""What a worker's steps, hand-offs and messages cost: a few numbers, fitted to a measured machine and kept as JSON.

    step_s = base + max(0, per_seq * decodes + per_prompt_token * prompt tokens - hidden)
                  + per_context_token * context of decodes
                  + per_prompt_context * (prompt tokens * context before each)

A step with prompt tokens takes `launch` at least: the time of a host that launches its kernels one by one, on a GPU
without a graph for the step.

A step reads all weights however few tokens it has, and multiplies meanwhile: `hidden` is what that hides, the flat part
of a roofline (Williams et al. 2009). So a few prompt tokens beside a few decodes take no time of their own.

It is linear in its numbers but for where the flat part ends. Least squares finds them for each such place, and the best
one is taken; no number is negative. Relative errors count, since a short step matters as much to its streams as a long
one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from engine.step import Step
from tandem.errors import ConfigError

_MOST_HIDDEN_ROWS = 256
_ROUNDING = 1e-18
"""A smaller difference between mean squares of relative errors says nothing."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes."""

    decodes: int
    context_tokens: int
    """That the decodes attend to, all together."""
    prompt_tokens: int
    prompt_context: int
    """Sum over prompt tokens of the number of tokens before each."""

    @classmethod
    def of(cls, step: Step) -> StepWork:
        """Returns that of a step; a chunk of one token costs what a decode does."""
        decodes = context = prompts = before = 0
        if step.rows is not None:
            decodes, context = len(step.rows), int(step.rows.context_lens.sum())
        for chunk in step.chunks:
            length = len(chunk.token_ids)
            if length == 1:
                decodes += 1
                context += chunk.context_len
            else:
                prompts += length
                before += length * chunk.context_len + length * (length - 1) // 2
        return cls(decodes, context, prompts, before)

    @property
    def rows(self) -> int:
        """Rows of the model's products."""
        return self.decodes + self.prompt_tokens

    def terms(self, hidden_rows: int) -> tuple[float, ...]:
        """What the numbers of `StepCosts` multiply, in order, if reading weights hides the arithmetic of so many."""
        if self.rows <= hidden_rows:
            return 1.0, 0.0, self.context_tokens, 0.0, self.prompt_context, 0.0
        return 1.0, self.decodes, self.context_tokens, self.prompt_tokens, self.prompt_context, -float(hidden_rows > 0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds."""

    base: float
    per_seq: float = 0.0
    per_context_token: float = 0.0
    per_prompt_token: float = 0.0
    per_prompt_context: float = 0.0
    hidden: float = 0.0
    launch: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of one step."""
        computed_s = (
            self.base
            + max(0.0, self.per_seq * work.decodes + self.per_prompt_token * work.prompt_tokens - self.hidden)
            + self.per_context_token * work.context_tokens
            + self.per_prompt_context * work.prompt_context
        )
        return max(computed_s, self.launch) if work.prompt_tokens else computed_s


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many times as long each part of a step takes while one other worker of the same host computes."""

    decode: float = 1.0
    prompt: float = 1.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a worker, and of messages and hand-offs between workers."""

    step: StepCosts
    decode_step: StepCosts | None = None
    """Costs of a worker of the fixed role decode, where its hardware or cores differ; None = `step`."""
    sharing: Sharing = Sharing()
    jitter: float = 0.0
    """Standard deviation of the logarithm of `base`, by which equal steps differ: `step` is their median. What is
    computed beyond that takes the same time again and again, so long steps differ by no more than short ones."""
    workers_per_host: int = 1
    threads: int = 1
    """With which the steps were measured."""
    block_size: int = 16
    pool_blocks: int = 4096
    max_seqs: int = 64
    chunk_tokens: int = 512
    prefill_chunk_tokens: int = 128
    """Where nothing decodes."""
    kv_bytes_per_token: int = 0
    handoff_s: float = 0.001
    """Seconds of an empty hand-off: opening and commit."""
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
    """Fitted costs, and the distance of measured steps from the fit."""

    costs: StepCosts
    median_error: float
    """Relative."""
    mean_square: float
    """Mean square of relative errors."""


def fit(samples: Sequence[tuple[StepWork, float]]) -> Fit:
    """Least squares over (work, seconds), no number negative. Of fits that are equally good, that which hides least."""
    places = sorted({0, *(work.rows for work, _ in samples if work.rows <= _MOST_HIDDEN_ROWS)})
    found = [_fit(samples, rows) for rows in places]
    best = min(each.mean_square for each in found)
    return next(each for each in found if each.mean_square <= best + _ROUNDING)


def _fit(samples: Sequence[tuple[StepWork, float]], hidden_rows: int) -> Fit:
    terms = np.array([work.terms(hidden_rows) for work, _ in samples], dtype=np.float64)
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
    costs = StepCosts(*numbers.tolist())
    errors = np.array([costs.seconds(work) / each - 1 for work, each in samples])
    return Fit(costs, float(np.median(np.abs(errors))), float(np.mean(errors**2)))


def served(costs: StepCosts, added_s: float, prompt_factor: float) -> StepCosts:
    """Each step `added_s` longer, prompts' numbers times `prompt_factor`."""
    return replace(
        costs,
        base=costs.base + added_s,
        per_prompt_token=prompt_factor * costs.per_prompt_token,
        per_prompt_context=prompt_factor * costs.per_prompt_context,
    )
