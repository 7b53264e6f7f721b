"""How many prompt tokens a step computes beside its decodes, so that streams keep their inter-token objective. Pure.

    tokens = (longest step - decode step) * tokens per second        where sequences decode
    tokens = `alone_tokens`                                          where none does

The longest step is the objective: the seconds that were asked for, or `OBJECTIVE_STEPS` of the shortest decode step
seen. It gives way to two things, and to nothing else:

1. The line of prompts. A first token should come within `waiting_served_ratio` times the time that its prompt takes
   alone (TGI has the option too). The last of n equal prompts waits n times that long even if nothing decodes, so
   prompts need the share n / ratio of a step: the decode step is at most 1 - n / ratio of it. From n = ratio on, chunks
   are whole: streams that begin among prompts have few long gaps, not many shorter ones.
2. The fixed cost of a mixed step: on a GPU, whose kernels are then launched one by one, it may be longer than the
   objective whatever the chunk. Beyond its decodes a mixed step takes at least `FIXED_COSTS` of that cost:

       fixed cost = least time beyond the decodes with few prompt tokens - these tokens * least time of a token

Learned from the steps that ended, by moving averages: the decode step of each size class (the nearest one stands for
one that is not known), and the tokens per second that prompts get beyond it. Results are multiples of a 128th of
`chunk_tokens`, at least one of them: prompts always advance, and few shapes of steps occur.

Where steps are padded to the next of some numbers of tokens, the rungs, decodes and chunk fill a rung: the largest that
the above allows, else the smallest beyond the decodes, since a smaller chunk would take as long. So only the step in
which the last prompts end is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.tuning import (
    FEWEST_SMALL,
    FIRST_GRAINS,
    FIXED_COSTS,
    GRAINS,
    MOST_GAIN,
    OBJECTIVE_STEPS,
    RATE_TOKENS,
    WEIGHT,
    WEIGHT_ABOVE,
    WEIGHT_BELOW,
)


class _TokenRate:
    """The tokens per second of prompts, over the last `RATE_TOKENS`, and over several steps at least."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keeps = 1 - min(tokens / RATE_TOKENS, WEIGHT)
        self._tokens = keeps * self._tokens + tokens
        self._seconds = keeps * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """Returns the rate; 0 = nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class _FixedCost:
    """The time of a mixed step beyond its decodes and its prompt tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        """Prompt tokens of mixed steps with few of them, and the least time of these steps beyond their decodes."""
        self.token_s = 0.0
        """Least time of a prompt token; 0 = not known."""
        self._num_small = 0

    @property
    def seconds(self) -> float:
        """Returns the fixed cost; 0 = there is none, or it is not known yet."""
        is_known = self._num_small >= FEWEST_SMALL
        return max(0.0, self._seconds - self._tokens * self.token_s) if is_known else 0.0

    def step_took(self, num_tokens: int, seconds: float, *, is_mixed: bool) -> None:
        """Learns from a step whose prompt tokens took `seconds` beyond its decodes."""
        token_s = seconds / num_tokens
        self.token_s += _weight(token_s, self.token_s, WEIGHT_ABOVE) * (token_s - self.token_s)
        if not is_mixed:
            return
        is_small = not 0 < 2 * self._tokens <= num_tokens
        if is_small or seconds < self._seconds:  # no step of any size is shorter than the fixed cost
            weight = _weight(seconds, self._seconds, WEIGHT_ABOVE)
            shown_s = min(seconds, 2 * self._seconds or seconds)  # a step that stood still counts twice the least
            self._seconds += weight * (shown_s - self._seconds)
            self._tokens += weight * (num_tokens - self._tokens) if is_small else 0.0
            self._num_small += is_small


class ChunkBudget:
    """The chunk budget of a worker that decodes."""

    def __init__(
        self,
        chunk_tokens: int,
        objective_s: float | None = None,
        waiting_served_ratio: float = 3.0,
        alone_tokens: int | None = None,
        rungs: Sequence[int] = (),
    ) -> None:
        """`objective_s` None = by the measured steps, 0 = none: each step beside decodes computes up to `chunk_tokens`.

        `alone_tokens` None = as many; never more. `rungs` ascend; beyond the last one no step is padded.
        """
        self.chunk_tokens = chunk_tokens
        """The most prompt tokens beside decodes."""
        self._alone_tokens = chunk_tokens if alone_tokens is None else min(alone_tokens, chunk_tokens)
        self._grain_tokens = max(1, chunk_tokens // GRAINS)
        self._rungs = rungs
        self._objective_s = objective_s
        self._most_wait_ratio = waiting_served_ratio
        self._decode_s: dict[int, float] = {}
        """By size class: decode steps of `[2**(c-1), 2**c)` sequences."""
        self._prompts = _TokenRate()
        """The rate of prompts, alone and beside decodes, without the time that decodes take."""
        self._fixed = _FixedCost()
        self._num_decodes = 0
        """Decodes of the last step with decodes."""
        self.num_prompt_tokens = 0
        """Prompt tokens that were computed so far."""

    def step_took(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learns from a step that has ended."""
        self.num_prompt_tokens += num_prompt_tokens
        self._num_decodes = num_decodes or self._num_decodes
        size, decode_s = num_decodes.bit_length(), self.decode_step_s(num_decodes)
        if not num_prompt_tokens:
            average = self._decode_s.get(size, seconds)
            self._decode_s[size] = average + _weight(seconds, average, WEIGHT) * (seconds - average)
        elif not num_decodes or decode_s:
            per_s = self._prompts.per_s
            least_s = num_prompt_tokens / (MOST_GAIN * per_s) if per_s else seconds / 100
            prompt_s = max(seconds - decode_s, least_s) if num_decodes else seconds
            self._prompts.add(num_prompt_tokens, prompt_s)
            self._fixed.step_took(num_prompt_tokens, prompt_s, is_mixed=num_decodes > 0)
        elif self._prompts.per_s and num_prompt_tokens <= FIRST_GRAINS * self._grain_tokens:
            # Before any decode step, a mixed one with a small chunk tells how long one takes.
            self._decode_s[size] = max(seconds - num_prompt_tokens / self._prompts.per_s, seconds / 4)

    def tokens(self, num_decodes: int, wait_ratio: float) -> int:
        """Returns the prompt tokens of the next step, in which `num_decodes` sequences decode.

        `wait_ratio`: as the method of that name has it for the prompts in line.
        """
        if not num_decodes:
            return self._alone_tokens
        return self._filling_a_rung(num_decodes, self._unpadded_tokens(num_decodes, wait_ratio))

    def _filling_a_rung(self, num_decodes: int, num_tokens: int) -> int:
        """Returns the prompt tokens that make a rung full beside the decodes; `num_tokens` if there is no such rung."""
        beyond = [rung for rung in self._rungs if rung > num_decodes]
        if not beyond:
            return num_tokens
        rung = max((each for each in beyond if each <= num_decodes + num_tokens), default=beyond[0])
        return min(rung - num_decodes, self.chunk_tokens)

    def _unpadded_tokens(self, num_decodes: int, wait_ratio: float) -> int:
        decode_s, per_s = self.decode_step_s(num_decodes), self._prompts.per_s
        share = wait_ratio / self._most_wait_ratio
        if self._objective_s == 0 or (share >= 1 and decode_s and per_s):
            return self.chunk_tokens
        if not decode_s or not per_s:
            return min(FIRST_GRAINS * self._grain_tokens, self.chunk_tokens)
        longest_s = max(self.step_objective_s, decode_s / (1 - share))
        chunk_s = max(longest_s - decode_s, FIXED_COSTS * self._fixed.seconds)
        num_grains = round(chunk_s * per_s) // self._grain_tokens
        return min(max(1, num_grains) * self._grain_tokens, self.chunk_tokens)

    def wait_ratio(self, line: Iterable[int]) -> float:
        """Returns how many times its own time alone the worst off prompt in line waits for its first token; 0 = none.

        `line`: the tokens that each prompt lacks, in the order in which they are computed. A prompt's own time is that
        of its tokens and of a decode step.
        """
        step_tokens = min(self._decode_s.values(), default=0.0) * self._prompts.per_s
        before, ratio = 0, 0.0
        for num_left in line:
            before += num_left
            ratio = max(ratio, (before + step_tokens) / (num_left + step_tokens))
        return ratio

    def decode_step_s(self, num_decodes: int) -> float:
        """Returns the time of a decode step of the next size class that is known, the smaller one of two; 0 = none."""
        size = num_decodes.bit_length()
        nearest = min(self._decode_s, key=lambda each: (abs(each - size), each), default=size)
        return self._decode_s.get(nearest, 0.0)

    def least_step_s(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Returns the least time that a step with prompt tokens takes, as far as it is known."""
        decode_s = self.decode_step_s(num_decodes) if num_decodes else 0.0
        return decode_s + num_prompt_tokens * self._fixed.token_s

    # --- what the worker reports ---

    def prompt_tokens_per_s(self, num_decodes: int, wait_ratio: float) -> float:
        """Returns what prompts get as things are now; 0 = not measured yet."""
        per_s = self._prompts.per_s
        if not num_decodes or not per_s:
            return per_s
        tokens = self.tokens(num_decodes, wait_ratio)
        return tokens / (self.decode_step_s(num_decodes) + tokens / per_s)

    @property
    def step_s(self) -> float:
        """A decode step of the size of the last one; 0 = there was none."""
        return self.decode_step_s(self._num_decodes)

    @property
    def step_objective_s(self) -> float:
        """The longest step that streams allow; 0 = there is none, or it is not known yet."""
        if self._objective_s is not None:
            return self._objective_s
        return OBJECTIVE_STEPS * min(self._decode_s.values(), default=0.0)


def _weight(new: float, known: float, above: float) -> float:
    """Returns the weight of a new value in a moving average that is `known`; 0 = nothing is known yet."""
    return 1.0 if not known else WEIGHT_BELOW if new < known else above
