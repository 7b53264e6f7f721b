"""What changes logits before temperature: penalties, biases, and the ban on ending too early.

In this order, each from the row's own parameters:

    repetition   logit / r if positive else logit * r, for each id of prompt or completion
                 (Keskar et al., CTRL, 2019; r on both signs as in transformers)
    presence     logit - a, for each id of the completion
    frequency    logit - b * count, for each id of the completion
    bias         logit + logit_bias[id]
    min_tokens   -inf for the end ids while fewer tokens than that have been sampled
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.step import SampleSpec
from engine.upload import upload
from tandem.types import SamplingParams


def changes_logits(spec: SampleSpec) -> bool:
    """Whether `adjust` would do anything."""
    return bool(spec.params.logit_bias or spec.output_index < spec.params.min_tokens or reads_output(spec.params))


def reads_output(params: SamplingParams) -> bool:
    """Whether `adjust` looks at the completion so far."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def adjust(row: torch.Tensor, spec: SampleSpec) -> None:
    """Changes one row of logits `[V]` in place."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = _to(np.unique(np.array(spec.prompt_token_ids + spec.output_token_ids, dtype=np.int64)), row)
        logits = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if (params.presence_penalty or params.frequency_penalty) and spec.output_token_ids:
        ids, counts = np.unique(np.array(spec.output_token_ids, dtype=np.int64), return_counts=True)
        loss = params.presence_penalty + params.frequency_penalty * counts
        row[_to(ids, row)] -= _to(loss, row).to(row.dtype)
    if params.logit_bias:
        bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        row[_to(np.array(list(params.logit_bias), dtype=np.int64), row)] += _to(bias, row).to(row.dtype)
    if spec.output_index < params.min_tokens and params.end_token_ids:
        row[_to(np.array(sorted(params.end_token_ids), dtype=np.int64), row)] = -torch.inf


def _to(values: npt.NDArray[np.generic], row: torch.Tensor) -> torch.Tensor:
    """On the row's device, without waiting for it."""
    return upload((values,), row.device)[0]
