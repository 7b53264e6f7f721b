"""What changes logits before temperature: biases, penalties, the ban on ending too early, token masks.

In this order, which is that of transformers, each from the row's own parameters:

    bias         logit + logit_bias[id]
    repetition   logit / r if positive else logit * r, for each id of prompt or completion
                 (Keskar et al., CTRL, 2019; r on both signs as in transformers)
    presence     logit - a, for each id of the completion
    frequency    logit - b * count, for each id of the completion
    min_tokens   -inf for the end ids while fewer tokens than that have been sampled
    mask         -inf for every token whose bit is 0 (`engine.draws.TokenMask`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from engine.draws import FixedChanges, SampleSpec, TokenMask
from engine.history import Ints, TokenHistory, distinct
from engine.upload import upload
from tandem.errors import InternalError
from tandem.token_ids import TokenIds
from tandem.types import SamplingParams, TokenId

_MASK_WORD_BITS = 32


def changes_logits(spec: SampleSpec) -> bool:
    """Whether `LogitChanges` would change the draw's logits."""
    return bool(spec.params.logit_bias or spec.output_index < spec.params.min_tokens or reads_output(spec.params))


def changes_logits_ever(params: SamplingParams) -> bool:
    """Whether `changes_logits` is ever true with these."""
    return bool(params.logit_bias or params.min_tokens or reads_output(params))


def reads_output(params: SamplingParams) -> bool:
    """Whether a penalty looks at the completion so far."""
    return params.repetition_penalty != 1.0 or _counts_output(params)


def penalised_ids(prompt_token_ids: Sequence[TokenId], params: SamplingParams) -> Ints:
    """The ids of a prompt that a penalty looks at, each once; none where only the completion counts."""
    if isinstance(prompt_token_ids, TokenIds):
        prompt_token_ids = cast("Sequence[TokenId]", prompt_token_ids.as_array)
    return distinct(prompt_token_ids if params.repetition_penalty != 1.0 else ())


def _counts_output(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


def fixed_changes(params: SamplingParams) -> FixedChanges | None:
    """What `params` change in every step alike, if anything. To be kept for each choice: an id takes a microsecond."""
    if not params.logit_bias and not params.min_tokens:
        return None
    return FixedChanges(
        np.fromiter(params.logit_bias.keys(), dtype=np.int64),
        np.fromiter(params.logit_bias.values(), dtype=np.float32),
        np.fromiter(params.end_token_ids, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """All but masks for a step's draws, each from its own row of `[D, V]`.

    A torch call for each kind of change, not for each row. One that is not asked for has no entries.
    """

    repetition: _Repetition
    counted: _Counted
    biases: _Entries
    ends: _Entries

    @classmethod
    def of(cls, draws: Sequence[_Row], fed_by: Mapping[int, int], device: torch.device) -> LogitChanges | None:
        """Returns None if none of `draws`, each with its number, asks for any.

        `fed_by`: for a draw whose history lacks the token that a feed brings: which draw of the step before brings it.
        """
        changed = [draw for draw in draws if changes_logits(draw[1])]
        if not changed:
            return None
        kinds = (
            _repetition_arrays([row for row in changed if row[1].params.repetition_penalty != 1.0], fed_by),
            _counted_arrays([row for row in changed if _counts_output(row[1].params)], fed_by),
            _bias_arrays([row for row in changed if row[1].params.logit_bias]),
            _end_arrays([row for row in changed if row[1].output_index < row[1].params.min_tokens]),
        )
        tensors = iter(upload([array for arrays in kinds for array in arrays], device))
        repetition, counted, biases, ends = (tuple(islice(tensors, len(arrays))) for arrays in kinds)
        return cls(_Repetition(*repetition), _Counted(*counted), _Entries(*biases), _Entries(*ends))

    def apply(self, logits: torch.Tensor, drawn_ids: torch.Tensor | None) -> None:
        """Changes `logits` `[D, V]` float32 in place. `drawn_ids` `[D']`: of the step before, -1 where broken."""
        if len(self.biases.rows):
            at = (self.biases.rows, self.biases.ids)
            logits.index_put_(at, logits[at] + self.biases.values)
        if len(self.repetition.rows):
            self.repetition.apply(logits, drawn_ids)
        if len(self.counted.rows) or len(self.counted.fed_rows):
            self.counted.apply(logits, drawn_ids)
        if len(self.ends.rows):
            logits.index_put_((self.ends.rows, self.ends.ids), self.ends.values)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Logits and a value for each: E of them."""

    rows: torch.Tensor  # [E] int64
    ids: torch.Tensor  # [E] int64
    values: torch.Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class _Repetition:
    """Logits of seen tokens, the fed ones last. One that stands here twice is given the same value twice."""

    rows: torch.Tensor  # [E + F] int64
    ids: torch.Tensor  # [E] int64
    penalties: torch.Tensor  # [E + F] float32
    fed_by: torch.Tensor  # [F] int64

    def apply(self, logits: torch.Tensor, drawn_ids: torch.Tensor | None) -> None:
        ids = self.ids
        if len(self.fed_by):
            ids = torch.cat((ids, _fed_ids(drawn_ids, self.fed_by)))
        seen = logits[self.rows, ids]
        lower = torch.where(seen > 0, seen / self.penalties, seen * self.penalties)
        logits.index_put_((self.rows, ids), lower)


@dataclass(frozen=True, slots=True)
class _Counted:
    """Logits of the completion's tokens, those of fed rows first: E of them, C in F fed rows."""

    rows: torch.Tensor  # [E] int64
    ids: torch.Tensor  # [E] int64
    losses: torch.Tensor  # [E] float32
    fed_rows: torch.Tensor  # [F] int64
    fed_by: torch.Tensor  # [F] int64
    presence: torch.Tensor  # [F] float64
    frequency: torch.Tensor  # [F] float64
    slots: torch.Tensor  # [C] int64: of which fed row the entry is
    counts: torch.Tensor  # [C] float64

    def apply(self, logits: torch.Tensor, drawn_ids: torch.Tensor | None) -> None:
        if not len(self.fed_rows):
            self._lower(logits)
            return
        fed_ids = _fed_ids(drawn_ids, self.fed_by)  # [F]
        before = logits[self.fed_rows, fed_ids]
        self._lower(logits)
        # The fed token counts once more than the history says: its logit is set again from what it was before.
        same = self.ids[: len(self.slots)] == fed_ids[self.slots]  # [C]
        counts = torch.ones_like(self.presence).index_add_(0, self.slots, self.counts * same)  # [F]
        losses = self.presence + self.frequency * counts
        logits.index_put_((self.fed_rows, fed_ids), before - losses.to(logits.dtype))

    def _lower(self, logits: torch.Tensor) -> None:
        at = (self.rows, self.ids)
        logits.index_put_(at, logits[at] - self.losses)


def _fed_ids(drawn_ids: torch.Tensor | None, fed_by: torch.Tensor) -> torch.Tensor:
    """`[F]` int64: 0 where a draw was broken, of which no later draw is kept."""
    if drawn_ids is None:
        raise InternalError("draws fed by a step that is not there")
    return drawn_ids.index_select(0, fed_by).clamp_(min=0)


_Row: TypeAlias = tuple[int, SampleSpec]
"""A draw's number, which is its row of logits, and what it asks for."""
_Arrays: TypeAlias = tuple[npt.NDArray[np.generic], ...]


def _repetition_arrays(rows: Sequence[_Row], fed_by: Mapping[int, int]) -> _Arrays:
    histories = [_history(spec) for _, spec in rows]
    prompts, outputs = [each.prompt_ids for each in histories], [each.output_ids for each in histories]
    fed = [number in fed_by for number, _ in rows]
    numbers = np.array([number for number, _ in rows], dtype=np.int64)
    penalties = np.array([spec.params.repetition_penalty for _, spec in rows], dtype=np.float32)
    lengths = ([*map(len, prompts)], [*map(len, outputs)], fed)
    return (
        np.concatenate([np.repeat(numbers, each) for each in lengths]),
        _joined([*prompts, *outputs]),
        np.concatenate([np.repeat(penalties, each) for each in lengths]),
        np.array([fed_by[number] for number, _ in rows if number in fed_by], dtype=np.int64),
    )


def _counted_arrays(rows: Sequence[_Row], fed_by: Mapping[int, int]) -> _Arrays:
    rows = sorted(rows, key=lambda row: row[0] not in fed_by)
    histories = [_history(spec) for _, spec in rows]
    ids = [each.output_ids for each in histories]
    lengths = [*map(len, ids)]
    numbers = np.array([number for number, _ in rows], dtype=np.int64)
    presence = np.array([spec.params.presence_penalty for _, spec in rows], dtype=np.float64)
    frequency = np.array([spec.params.frequency_penalty for _, spec in rows], dtype=np.float64)
    counts = _joined([each.output_counts for each in histories])
    losses = np.repeat(presence, lengths) + np.repeat(frequency, lengths) * counts
    fed = [fed_by[number] for number, _ in rows if number in fed_by]
    num_fed, num_counted = len(fed), sum(lengths[: len(fed)])
    return (
        np.repeat(numbers, lengths),
        _joined(ids),
        losses.astype(np.float32),
        numbers[:num_fed],
        np.array(fed, dtype=np.int64),
        presence[:num_fed],
        frequency[:num_fed],
        np.repeat(np.arange(num_fed), lengths[:num_fed]),
        counts[:num_counted].astype(np.float64),
    )


def _bias_arrays(rows: Sequence[_Row]) -> _Arrays:
    fixed = [_fixed(spec) for _, spec in rows]
    biases = np.concatenate([np.empty(0, dtype=np.float32), *(each.biases for each in fixed)])
    return *_entries(rows, [each.bias_ids for each in fixed]), biases


def _end_arrays(rows: Sequence[_Row]) -> _Arrays:
    numbers, ids = _entries(rows, [_fixed(spec).end_ids for _, spec in rows])
    return numbers, ids, np.full(len(ids), -np.inf, dtype=np.float32)


def _entries(rows: Sequence[_Row], ids: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Returns the number of its row for each of `ids`, which are by row, and all ids."""
    numbers = np.array([number for number, _ in rows], dtype=np.int64)
    return np.repeat(numbers, [*map(len, ids)]), _joined(ids)


def _fixed(spec: SampleSpec) -> FixedChanges:
    fixed = spec.fixed or fixed_changes(spec.params)
    assert fixed is not None, "a draw with changes"
    return fixed


def _history(spec: SampleSpec) -> TokenHistory:
    if spec.history is None:
        raise InternalError("a draw with penalties and without the tokens that they are for")
    return spec.history


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be drawn, for M of a step's draws."""

    draws: torch.Tensor
    """`[M]` int64: their numbers."""
    words: torch.Tensor
    """`[M, W]` int32 on a GPU, which unpacks them; on a CPU `[M, W * 32]` float32, 0 or -inf."""

    @classmethod
    def of(cls, masks: Sequence[tuple[int, TokenMask]], device: torch.device) -> TokenMasks | None:
        """Returns None for no `masks`, each with the number of its draw. Raises InternalError if lengths differ."""
        if not masks:
            return None
        draws, given = zip(*masks, strict=True)
        if len({mask.shape for mask in given}) > 1:
            raise InternalError(f"token masks of {sorted({mask.shape for mask in given})} words in one step")
        words, numbers = np.stack(given), np.array(draws, dtype=np.int64)  # [M, W], [M]
        if device.type == "cpu":
            bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, bitorder="little")  # [M, W * 32]
            return cls(*upload((numbers, np.where(bits, np.float32(0), np.float32(-np.inf))), device))
        return cls(*upload((numbers, words.view(np.int32)), device))

    def apply(self, logits: torch.Tensor) -> None:
        """-inf for every other token in the draws' rows of `logits` `[D, V]` float32. Raises InternalError by width."""
        is_packed, vocab_size = self.words.dtype == torch.int32, logits.shape[1]
        num_bits = self.words.shape[1] * (_MASK_WORD_BITS if is_packed else 1)
        if not 0 <= num_bits - vocab_size < _MASK_WORD_BITS:
            raise InternalError(f"token masks of {num_bits} bits for a vocabulary of {vocab_size}")
        if is_packed:  # on a GPU a few launches serve all draws
            shifts = torch.arange(_MASK_WORD_BITS, dtype=torch.int32, device=logits.device)
            bits = ((self.words[:, :, None] >> shifts) & 1).flatten(1)  # [M, W * 32]
            logits.index_add_(0, self.draws, torch.where(bits[:, :vocab_size] > 0, 0.0, -torch.inf))
            return
        for number, loss in zip(self.draws.tolist(), self.words, strict=True):
            logits[number].add_(loss[:vocab_size])
