"""How far bfloat16 logits, ours and those of transformers, lie from those of the same weights in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.support.reference import load_transformers
from engine.batch import build_batch
from engine.kv_cache import KvCache
from engine.step import ScheduledSeq
from kernels.compiled_step import StepInputs
from kernels.dispatch import AUTO, select_kernels
from models.files.checkpoint import read_checkpoint
from models.loading import LoadedModel, load_model
from tandem.kv_layout import QuantDType
from tandem.types import BlockId, TokenId

MAX_RATIO = 1.2
MAX_RATIOS_OF_KV = {QuantDType.INT8: 1.8, QuantDType.FP8: 7.0}
"""Of quantized KV: a scale per token and head leaves int8 7 bits and e4m3 3."""
_NUM_TOKENS = 256
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LogitError:
    """Root mean square of a position's (logits - truth), the median of all positions of one text.

    Of the median, since rounding makes a router choose other experts for some tokens, whose logits are then far away:
    of a mean, one more or one less of these would be all that is seen.
    """

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours in units of theirs."""
        return self.ours / self.theirs


def measure_logit_errors(
    folder: Path, seed: int, kv_dtypes: Sequence[QuantDType | None] = (None,)
) -> tuple[LogitError, ...]:
    """Random tokens through all three; `kv_dtypes` are the ways in which ours stores KV, None as it is computed."""
    config = read_checkpoint(str(folder))
    rng = random.Random(seed)
    token_ids = [rng.randrange(config.vocab_size) for _ in range(min(_NUM_TOKENS, config.context_tokens))]
    theirs = load_transformers(folder, torch.bfloat16)
    with torch.no_grad():
        their_logits = theirs(torch.tensor([token_ids])).logits[0]
        truth = theirs.double()(torch.tensor([token_ids])).logits[0]  # [T, V]
    their_error = _rms(their_logits - truth)
    device = torch.device("cpu")
    ours = load_model(folder, "bfloat16", device, select_kernels(AUTO, device, torch.bfloat16))
    return tuple(
        LogitError(_rms(_our_logits(ours, token_ids, kv_dtype) - truth), their_error) for kv_dtype in kv_dtypes
    )


def _our_logits(model: LoadedModel, token_ids: list[int], kv_dtype: QuantDType | None) -> torch.Tensor:
    """Logits `[T, V]` of every position, the prompt in one step."""
    device = torch.device("cpu")
    layout = model.kv_layout(_BLOCK_SIZE, kv_dtype)
    kv_cache = KvCache.create(layout, layout.blocks_for(len(token_ids)), device)
    try:
        table = tuple(BlockId(block) for block in range(kv_cache.num_blocks))
        seq = ScheduledSeq(tuple(TokenId(token_id) for token_id in token_ids), 0, table)
        batch = build_batch([seq], _BLOCK_SIZE, device)
        rows = torch.arange(len(token_ids))
        inputs = StepInputs(batch.token_ids, batch.positions, kv_cache.tensor, batch.metadata, rows)
        return model.decoder.forward(inputs).double()
    finally:
        kv_cache.close()


def _rms(difference: torch.Tensor) -> float:
    """Of rows `[T, V]`, the median."""
    return float(difference.double().pow(2).mean(dim=1).sqrt().median())
