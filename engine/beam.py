"""Beam search as a pure state machine: the best next tokens of each beam in, who continues whom out.

    one beam ─ advance ─▶ up to W beams ─ advance ─▶ … ─▶ is_done: `best(i)` are the completions, best first

The rules are those of transformers' `generate(num_beams=W, do_sample=False)`: of all beams' continuations, the W best
that do not end run on; a continuation that ends counts only if it is among the W best of all, and only the W best of
those are kept. A score is the float32 sum of a completion's log-probabilities, divided by length ** length_penalty.
Scores are float32 at every step, as there, so that what lies close to another ends up in the same order. Equal scores
go to the earlier beam, and to what ended earlier.

Knows no blocks and no engine; the state is a function of the candidates that it was given.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from tandem.errors import InternalError
from tandem.types import Candidates, EarlyStopping, FinishReason, SamplingParams, TokenId, TokenLogprobs

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

_Tokens: TypeAlias = "tuple[_Tokens, TokenLogprobs] | None"
"""A completion as a chain from its last token to its first: beams share what they have in common."""


class Continuation(NamedTuple):
    """A beam of the next step: that one of the last step, and one token more."""

    parent: int
    """Its place among the beams before the step."""
    token_id: TokenId


class _Beam(NamedTuple):
    score: float
    """Sum of its tokens' log-probabilities; a float32."""
    tokens: _Tokens


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion that the search has found."""

    tokens: tuple[TokenLogprobs, ...]
    """Each with the log-probability that it added to the score; `top` as many alternatives as were asked for."""
    score: float
    finish_reason: FinishReason


def num_candidates(params: SamplingParams) -> int:
    """How many continuations of each beam `advance` must be given: end tokens take no place of one that runs on."""
    return max(params.beam_width + len(params.end_token_ids), params.logprobs or 0)


class BeamSearch:
    """A search that starts with a single beam, the prompt."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._width = params.beam_width
        self._length = 0
        self._beams = [_Beam(0.0, None)]
        """Best first; empty only at the end."""
        self._finished: list[Hypothesis] = []
        """Best first, at most `_width`."""
        self.is_done = False

    def advance(self, drawn: Sequence[Candidates]) -> tuple[Continuation, ...]:
        """One step of all beams: `drawn` are the best continuations of each; returns the beams of the next step."""
        if self.is_done or len(drawn) != len(self._beams):
            raise InternalError(f"candidates of {len(drawn)} beams, not of {len(self._beams)}")
        self._length += 1
        running: list[_Beam] = []
        continuations: list[Continuation] = []
        for place, (score, parent, rank) in enumerate(self._ranked(drawn)):
            token_id, logprob = drawn[parent][rank]
            reason = self._finish_reason(token_id)
            if reason is None and len(running) < self._width:
                running.append(_Beam(score, self._longer(parent, token_id, logprob, drawn)))
                continuations.append(Continuation(parent, token_id))
            elif reason is not None and place < self._width:
                self._keep(score, self._longer(parent, token_id, logprob, drawn), reason)
            elif place >= self._width and len(running) == self._width:
                break
        self._beams = running
        self.is_done = not running or not self._may_improve()
        return () if self.is_done else tuple(continuations)

    def best(self, index: int) -> Hypothesis:
        """Completion number `index`, the best being 0; where there are fewer, the last of them."""
        return self._finished[min(index, len(self._finished) - 1)]

    def _ranked(self, drawn: Sequence[Candidates]) -> list[tuple[float, int, int]]:
        """Score, beam and rank there of all continuations, best first."""
        places = [(beam, rank) for beam, candidates in enumerate(drawn) for rank in range(len(candidates))]
        before = np.array([self._beams[beam].score for beam, _ in places], dtype=np.float32)
        added = np.array([drawn[beam][rank][1] for beam, rank in places], dtype=np.float32)
        scores = before + added
        order = np.argsort(-scores, kind="stable")
        return [(score, *places[at]) for score, at in zip(scores[order].tolist(), order.tolist(), strict=True)]

    def _finish_reason(self, token_id: TokenId) -> FinishReason | None:
        if token_id in self._params.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._length >= self._params.max_tokens else None

    def _longer(self, parent: int, token_id: TokenId, logprob: float, drawn: Sequence[Candidates]) -> _Tokens:
        alternatives = drawn[parent][: self._params.logprobs or 0]
        return self._beams[parent].tokens, TokenLogprobs(token_id, logprob, alternatives)

    def _keep(self, score: float, tokens: _Tokens, reason: FinishReason) -> None:
        penalised = self._penalised(score, self._length)
        at = bisect.bisect_right(self._finished, -penalised, key=lambda each: -each.score)
        if at < self._width:
            self._finished.insert(at, Hypothesis(_whole(tokens), penalised, reason))
            del self._finished[self._width :]

    def _may_improve(self) -> bool:
        """Whether going on may bring a better hypothesis, by transformers' heuristics."""
        if len(self._finished) < self._width:
            return True
        stopping = self._params.early_stopping
        if stopping is EarlyStopping.ALWAYS:
            return False
        is_longest_best = stopping is EarlyStopping.NEVER and self._params.length_penalty > 0.0
        length = self._params.max_tokens if is_longest_best else self._length
        return self._penalised(self._beams[0].score, length) > self._finished[-1].score

    def _penalised(self, score: float, length: int) -> float:
        """Returns a quotient of float32 numbers, itself float32; always finite."""
        divisor = min(max(float(length) ** self._params.length_penalty, _SMALLEST), _LARGEST)
        quotient = score / float(np.float32(divisor))
        return float(np.float32(math.copysign(min(abs(quotient), _LARGEST), quotient)))


def _whole(tokens: _Tokens) -> tuple[TokenLogprobs, ...]:
    found: list[TokenLogprobs] = []
    while tokens is not None:
        tokens, last = tokens
        found.append(last)
    return tuple(reversed(found))
