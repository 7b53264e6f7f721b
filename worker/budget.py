"""How many prompt tokens a step computes beside its decodes, so that streams keep their inter-token objective. Pure.

    while sequences decode    tokens = (longest step - decode step) * tokens per second
    while one is awaited      tokens = longest step * tokens per second
    while none is             as many as keep the device busy: `alone_tokens`

The longest step is the objective: the seconds that were asked for, or `FEW_STEPS` of the shortest decode steps seen,
those of few sequences, and at least `OWN_STEPS` of the same size: what callers expect stays as the batch grows.

The objective gives way to the line of prompts. A prompt's first token should come within `waiting_served_ratio` times
the time that the prompt takes alone (TGI has the option too). The last of n equal prompts waits n times that long even
if nothing decodes, so prompts need n / ratio of a step: where the objective leaves less, the step is so long that the
decode step is 1 - n / ratio of it. Chunks are whole from n = ratio on, and while the line has a prompt that will have
waited `LATE` times the ratio in all. So streams that begin among prompts have few long gaps, not many shorter ones.

The objective gives way to the fixed cost of a mixed step too: on a GPU, whose kernels are then launched one by one, it
may be longer than the objective whatever the chunk. Beyond its decodes a mixed step takes `FIXED_TIMES` of that cost:

    fixed cost = least time beyond the decodes with few prompt tokens - these tokens * least time of a token

Learned from the steps that ended, by moving averages: the decode step of each size class, the tokens per second that
prompts get beyond it, and how much longer mixed steps took than expected, since later tokens of a prompt cost more. The
nearest size class stands for one that is not known; before any is, a mixed step with a small chunk tells. Results are
multiples of a 128th of `chunk_tokens`, at least one of them: prompts always advance, and few shapes of steps occur.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.token_rate import TokenRate

FEW_STEPS = 2.2
OWN_STEPS = 1.6
MARGIN = 0.9
"""Of the longest step, that a chunk may make it last by what was measured: other processes slow some steps down."""
LATE = 2
"""Times `waiting_served_ratio`: who waits for longer in all is computed at full speed, whoever streams."""
FIXED_TIMES = 3
"""Fixed costs in a mixed step and its chunk, at least: prompts get two thirds of what their tokens alone would."""
_MOST_OVERRUN = 2.0
"""Of one mixed step that counts."""
_FEWEST_SMALL = 8
"""Mixed steps with few prompt tokens that tell a fixed cost: the first ones may compile kernels or stand still."""
_GRAINS = 128
_FIRST_GRAINS = 8
"""Beside decodes, before anything is known of either."""
_WEIGHT = 1 / 8
"""Of the newest step in the moving averages."""
_WEIGHT_BELOW = 1 / 2
"""Of a step that is shorter than the average: what made the others longer was something else."""
_WEIGHT_ABOVE = 1 / 64
"""Of a step that is longer than the least: fixed costs are remembered while chunks of one size do not show them."""
_FIRST_STEP_TOKENS = 32
"""Prompt tokens that take as long as a step of few sequences, before either was measured."""
_MOST_GAIN = 4.0
"""Beside decodes, prompts get at most so many times their rate alone: less than nothing cannot be measured."""


@dataclass(frozen=True, slots=True)
class PromptInLine:
    """One that is being computed, or waits for that."""

    num_left: int
    """Tokens that it lacks."""
    num_tokens: int
    """That it lacked when it came."""
    waited_tokens: int
    """Prompt tokens that were computed here since it came: its age, as `worker.admission.turn_of` counts it."""


@dataclass(slots=True)
class _Learned:
    """How long steps take."""

    decode_s: dict[int, float]
    """By size class: steps of `[2**(c-1), 2**c)` sequences."""
    prompts: TokenRate
    """Of prompts, alone and beside decodes, without the time that these take."""
    overrun: float = 1.0
    """How many times as long mixed steps take as expected."""
    small_tokens: float = 0.0
    small_s: float = 0.0
    """Prompt tokens of mixed steps with few, and the least time of these steps beyond a decode step; 0 = not known."""
    num_small: int = 0
    token_s: float = 0.0
    """Least time of a prompt token; 0 = not known."""

    @property
    def fixed_s(self) -> float:
        """Time of a mixed step beyond its decodes and its prompt tokens."""
        is_known = self.num_small >= _FEWEST_SMALL
        return max(0.0, self.small_s - self.small_tokens * self.token_s) if is_known else 0.0

    def add_prompts(self, num_tokens: int, seconds: float, *, is_mixed: bool) -> None:
        """Learns from a step with so many prompt tokens, which took `seconds` beyond its decodes."""
        self.prompts.add(num_tokens, seconds)
        token_s = seconds / max(1, num_tokens)
        self.token_s += _weight(token_s, self.token_s) * (token_s - self.token_s)
        is_small = not 0 < 2 * self.small_tokens <= num_tokens
        if is_mixed and (is_small or seconds < self.small_s):  # no step of any size is shorter than the fixed cost
            weight = _weight(seconds, self.small_s)
            shown_s = min(seconds, _MOST_OVERRUN * self.small_s or seconds)
            self.small_s += weight * (shown_s - self.small_s)
            self.small_tokens += weight * (num_tokens - self.small_tokens) if is_small else 0.0
            self.num_small += is_small

    def decode_step_s(self, num_decodes: int) -> float:
        """A decode step of the next size class that is known, the smaller one of two; 0 = none is."""
        size = num_decodes.bit_length()
        return self.decode_s[min(self.decode_s, key=lambda each: (abs(each - size), each))] if self.decode_s else 0.0

    def seconds(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """What a step is expected to take; 0 = that is not known."""
        decode_s, per_s = self.decode_step_s(num_decodes) if num_decodes else 0.0, self.prompts.per_s
        if (num_decodes and not decode_s) or (num_prompt_tokens and not per_s):
            return 0.0
        return decode_s + (num_prompt_tokens / per_s if num_prompt_tokens else 0.0)


class ChunkBudget:
    """Of one worker that decodes."""

    def __init__(
        self,
        chunk_tokens: int,
        objective_s: float | None = None,
        waiting_served_ratio: float = 3.0,
        alone_tokens: int | None = None,
    ) -> None:
        """`objective_s` None = by the measured steps, 0 = none: each step beside decodes computes up to `chunk_tokens`.

        `alone_tokens` None = as many; never more.
        """
        self._chunk_tokens = chunk_tokens
        self._alone_tokens = chunk_tokens if alone_tokens is None else min(alone_tokens, chunk_tokens)
        self._grain_tokens = max(1, chunk_tokens // _GRAINS)
        self._objective_s = objective_s
        self._most_wait_ratio = waiting_served_ratio
        self._now = _Learned({}, TokenRate())
        self._num_decodes = 0
        """Of the last step that had any."""
        self.num_prompt_tokens = 0
        """That were computed so far."""

    def step_took(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step has ended."""
        self.num_prompt_tokens += num_prompt_tokens
        if num_decodes:
            self._num_decodes = num_decodes
        if not num_decodes:
            self._now.add_prompts(num_prompt_tokens, seconds, is_mixed=False)
        elif not num_prompt_tokens:
            size = num_decodes.bit_length()
            average = self._now.decode_s.get(size, seconds)
            self._now.decode_s[size] = average + _weight(seconds, average, _WEIGHT) * (seconds - average)
        else:
            self._mixed_step_took(num_decodes, num_prompt_tokens, seconds)

    def _mixed_step_took(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        decode_s, per_s = self._now.decode_step_s(num_decodes), self._now.prompts.per_s
        least_s = num_prompt_tokens / (_MOST_GAIN * per_s) if per_s else seconds / 100
        if expected_s := self._now.seconds(num_decodes, num_prompt_tokens):
            overrun = min(seconds / expected_s, _MOST_OVERRUN)
            self._now.overrun += _WEIGHT * (overrun - self._now.overrun)
        if decode_s:
            self._now.add_prompts(num_prompt_tokens, max(seconds - decode_s, least_s), is_mixed=True)
        elif per_s and num_prompt_tokens <= _FIRST_GRAINS * self._grain_tokens:
            self._now.decode_s[num_decodes.bit_length()] = max(seconds - num_prompt_tokens / per_s, seconds / 4)

    def tokens(self, num_decodes: int, wait_ratio: float, *, is_awaited: bool = False) -> int:
        """Prompt tokens of the next step, in which so many sequences decode. `wait_ratio`: of the prompts in line.

        `is_awaited`: whether a sequence may begin to decode at any time. Until it does, steps are as short as with it.
        """
        num_streams = num_decodes or int(is_awaited)
        decode_s, per_s = self._now.decode_step_s(num_streams), self._now.prompts.per_s
        most = self._chunk_tokens if num_decodes else self._alone_tokens
        if not num_streams or self._objective_s == 0:
            return most
        if not decode_s or not per_s:
            return min(_FIRST_GRAINS * self._grain_tokens, most)
        share = wait_ratio / self._most_wait_ratio
        if share >= 1:
            return most
        longest_s = max(MARGIN * self.objective_s(num_streams), decode_s / (1 - share)) / max(1.0, self._now.overrun)
        left_s = longest_s - decode_s if num_decodes else longest_s
        num_grains = round(max(left_s, FIXED_TIMES * self._now.fixed_s) * per_s) // self._grain_tokens
        return min(max(1, num_grains) * self._grain_tokens, most)

    def objective_s(self, num_decodes: int) -> float:
        """Longest step for so many sequences; 0 = there is none, or it is not known yet."""
        if self._objective_s is not None:
            return self._objective_s
        few_s = min(self._now.decode_s.values(), default=0.0)
        return max(FEW_STEPS * few_s, OWN_STEPS * self._now.decode_step_s(num_decodes))

    def wait_ratio(self, line: Iterable[PromptInLine]) -> float:
        """How many times its own computing time the worst off of these prompts waits for its first token; 0 = none is.

        At any one rate, from now on; at least `LATE` times the option where one will have waited that long in all.
        `line`: in the order in which they are computed. The own time of a prompt is that of its tokens and of a step.
        """
        step_tokens = min(self._now.decode_s.values(), default=0.0) * self._now.prompts.per_s or _FIRST_STEP_TOKENS
        before, from_now, in_all = 0, 0.0, 0.0
        for each in line:
            before += each.num_left
            from_now = max(from_now, (before + step_tokens) / (each.num_left + step_tokens))
            in_all = max(in_all, (each.waited_tokens + before + step_tokens) / (each.num_tokens + step_tokens))
        late = LATE * self._most_wait_ratio
        return max(from_now, late) if in_all >= late else from_now

    # --- what the worker reports ---

    def prompt_tokens_per_s(self, num_decodes: int, wait_ratio: float) -> float:
        """What prompts get as things are now; 0 = not measured yet."""
        per_s = self._now.prompts.per_s
        if not num_decodes:
            return per_s
        tokens = self.tokens(num_decodes, wait_ratio)
        return tokens / (self._now.decode_step_s(num_decodes) + tokens / per_s) if per_s else 0.0

    @property
    def step_s(self) -> float:
        """A decode step of the size of the last one; 0 = there was none."""
        return self._now.decode_step_s(self._num_decodes)

    @property
    def step_objective_s(self) -> float:
        """Longest step for the last size; 0 = none, or not known yet."""
        return self.objective_s(self._num_decodes)


def _weight(new: float, known: float, above: float = _WEIGHT_ABOVE) -> float:
    """Returns the weight of a new value in a moving average that is `known`; 0 = nothing is known yet."""
    return 1.0 if not known else _WEIGHT_BELOW if new < known else above
