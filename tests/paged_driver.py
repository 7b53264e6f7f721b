"""A driver that runs a decoder over blocks without the engine; changes of tiny checkpoints; transformers' tokens."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.kv_cache import KvCache
from kernels.attention import AttentionMetadata
from kernels.compiled_step import StepInputs
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.loading import LoadedModel, load_model

CPU = torch.device("cpu")
REFERENCE = Kernels(ReferenceBackend(), ReferenceOperations())


@dataclass
class PagedSeq:
    """One sequence of the driver: its tokens, how many have KV, its blocks."""

    token_ids: list[int]
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)


class PagedDriver:
    """Steps a decoder over a shuffled pool whose unwritten slots are NaN, so that reading one shows."""

    def __init__(self, model: LoadedModel, block_size: int, num_blocks: int) -> None:
        self._model = model
        self._block_size = block_size
        layout = model.rank_layout(block_size)
        cache = KvCache.create(layout, num_blocks, CPU)
        cache.fill_poison()
        self._kv_cache = cache.tensor
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)

    def step(self, work: Sequence[tuple[PagedSeq, int]]) -> torch.Tensor:
        """Computes the next n tokens of each seq; returns logits `[T, V]` of all of them."""
        for seq, num_tokens in work:
            while len(seq.block_table) * self._block_size < seq.num_computed_tokens + num_tokens:
                seq.block_table.append(self._free.pop())
        spans = [range(seq.num_computed_tokens, seq.num_computed_tokens + n) for seq, n in work]
        positions = torch.tensor([position for span in spans for position in span])
        token_ids = torch.tensor([seq.token_ids[p] for (seq, _), span in zip(work, spans, strict=True) for p in span])
        rows = torch.arange(len(token_ids))
        inputs = StepInputs(token_ids, positions, self._kv_cache, self._metadata(work, spans), rows)
        logits = self._model.decoder.forward(inputs)
        for seq, num_tokens in work:
            seq.num_computed_tokens += num_tokens
        return logits

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, chunk_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt; all start at once, chunks and decode steps share batches."""
        seqs = [PagedSeq(list(prompt)) for prompt in prompts]
        ends = [len(prompt) + max_tokens for prompt in prompts]
        while True:
            work, budget = [], chunk_tokens
            for seq, end in zip(seqs, ends, strict=True):
                num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
                if len(seq.token_ids) < end and num_tokens:
                    work.append((seq, num_tokens))
                    budget -= num_tokens
            if not work:
                return [seq.token_ids[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]
            logits = self.step(work)
            for (seq, _), last in zip(work, accumulate(n for _, n in work), strict=True):
                if seq.num_computed_tokens == len(seq.token_ids):
                    seq.token_ids.append(int(logits[last - 1].argmax()))

    def _metadata(self, work: Sequence[tuple[PagedSeq, int]], spans: Sequence[range]) -> AttentionMetadata:
        width = max(len(seq.block_table) for seq, _ in work)
        tables = [seq.block_table + [-1] * (width - len(seq.block_table)) for seq, _ in work]
        size = self._block_size
        slots = [
            seq.block_table[p // size] * size + p % size for (seq, _), s in zip(work, spans, strict=True) for p in s
        ]
        query_lens = tuple(n for _, n in work)
        seq_lens = tuple(span.stop for span in spans)
        return AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )


def load_tiny(folder: Path, dtype: str | None = None, form: QuantForm | None = None) -> LoadedModel:
    """On the reference's kernels."""
    return load_model(folder, dtype, CPU, REFERENCE, form)


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Experts one by one: grouped products know no float64. It writes on past an end token, as the driver does."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, experts_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens by transformers' own `generate`."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    return [int(token) for token in out[0, len(prompt) :]]


def random_prompt(length: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    rng = random.Random(f"{length}-{seed}")
    return [rng.randrange(vocab_size) for _ in range(length)]


def logits_of(model: LoadedModel, length: int = 40) -> torch.Tensor:
    """Of each token of a prompt that is computed at once."""
    return PagedDriver(model, 16, 1 + length // 16).step([(PagedSeq(random_prompt(length)), length)])


@torch.no_grad()
def transformers_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def change_tensors(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], file_name: str = "model.safetensors"
) -> None:
    tensors = load_file(folder / file_name)
    edit(tensors)
    save_file(tensors, folder / file_name, metadata={"format": "pt"})


def change_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edited(folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object] | None = None, **keys: Any) -> Path:
    """A copy with another config.json."""
    copy = shutil.copytree(folder, tmp_path / "edited")
    change_json(copy / "config.json", edit or (lambda config: config.update(keys)))
    return copy
