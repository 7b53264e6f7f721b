"""The `flash_attn` back-end: FlashAttention's own kernels for steps of prompts, Triton's for the rest.

Sources: Dao, FlashAttention-2 (arXiv 2307.08691); Shah et al., FlashAttention-3 (arXiv 2407.08608), for Hopper; for
Hopper and Blackwell the package flash-attn-4 (FlashAttention in the CuTe DSL), where version 3 is not there.
A step in which every seq computes two tokens or more is cut into runs of neighbouring seqs:

    FRESH   all keys are this step's own: read from the ragged k and v, no block table at all
    PAGED   the others: from the pool

Steps in which streams take part are Triton's as a whole. For decode on an H100 version 3 takes up to 1.4 times as long
with short contexts and 7 % less with long ones; what it costs on the host to cut a step in two was not measured. For
prompts version 2 takes 1.2 to 1.7 times as long as Triton there, so it is not used there (bench/LOG.md, "flash-attn on
a GPU"). Version 4 was not measured, so that it serves only where it is asked for.

Heads have up to 256 elements; those that are no multiple of 8 would be padded, which would copy the pool. flash-attn 2
takes blocks of 256 tokens and their multiples only ("Paged KV cache block size must be divisible by 256"), version 3
any. Version 4 takes pages of any size, but those that hold whole tiles of keys are loaded with the rows behind a
sequence's end, which must be finite then: here it gets smaller ones. What the package does not take, sinks among it,
goes to the other back-end.

torch has a copy of the same kernels (`torch.nn.attention.varlen`) without soft cap; it is not
used, since Triton's kernels stand there already and nothing shows that it would beat them.

Tests: tests/kernels/test_flash.py.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from types import ModuleType
from typing import Any

import torch

from kernels import triton
from kernels.attention import AttentionBackend, AttentionMetadata, AttentionParams
from kernels.operations import Kernels
from kernels.quantized_kv import is_quantized
from kernels.spec import check_attend
from tandem.errors import InternalError

PAGE_MULTIPLE = 256
"""Block sizes that flash-attn 2's block tables take."""
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8
MIN_FRESH_TOKENS = 256
"""A shorter fresh run beside paged ones joins them: one launch less per layer. Chosen, not measured."""
_DTYPES = (torch.bfloat16, torch.float16)
_FRESH_3 = ("softcap", "window_size", "return_attn_probs")
"""Arguments of the call. Without the last one the call returns a tuple (before August 2025)."""
_PAGED_3 = ("cache_seqlens", "page_table", "cu_seqlens_q", "softcap", "window_size")
_CALL_4 = (
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table"),
    *("softmax_scale", "causal", "window_size"),
)
_LEAST_TILE = 64
"""Keys of the smallest tile of version 4."""
_HOPPER = 9
_BLACKWELL = (10, 11)
"""Major compute capabilities of the GPUs that versions 3 and 4 are made for; 12 has no pages in version 4."""
_WIDEST_4, _WIDE_4 = 256, 128
"""Head dimensions of version 4 on Blackwell: up to the latter, and the former alone."""


class Source(enum.Enum):
    """Where a run's keys are read from."""

    FRESH = enum.auto()
    PAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring seqs `first … end - 1` of a batch whose keys come from one source."""

    source: Source
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Flash2:
    """The package flash-attn."""

    module: Any

    def takes(self, block_size: int) -> bool:
        """Whether `paged` serves such blocks."""
        return block_size % PAGE_MULTIPLE == 0

    def computes(self, head_dim: int, params: AttentionParams) -> bool:
        """Whether the package computes such heads."""
        return head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_MULTIPLE == 0 and params.sinks is None

    def fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """Ragged q `[T, H, D]` over k, v `[T, Hkv, D]` of the same seqs."""
        cu_seqlens, longest = metadata.cu_seqlens_q, metadata.max_query_len
        out: torch.Tensor = self.module.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, **_options(params)
        )
        return out

    def paged(
        self, q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """Ragged q `[T, H, D]` over the pool's blocks `[N, 2, Hkv, S, D]`."""
        cu_seqlens_k = torch.zeros_like(metadata.cu_seqlens_q)  # [B + 1]
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        out: torch.Tensor = self.module.flash_attn_varlen_func(
            q,
            *_sides(kv_layer),
            *(metadata.cu_seqlens_q, cu_seqlens_k, metadata.max_query_len, metadata.max_seq_len),
            block_table=metadata.block_tables,
            **_options(params),
        )
        return out


@dataclass(frozen=True, slots=True)
class Flash3(Flash2):
    """The package flash_attn_3, whose module is flash_attn_interface."""

    def takes(self, block_size: int) -> bool:
        """See `Flash2.takes`: all."""
        return True

    def paged(
        self, q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """See `Flash2.paged`."""
        out: torch.Tensor = self.module.flash_attn_with_kvcache(
            q,
            *_sides(kv_layer),
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_tables,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_query_len,
            **_options(params),
        )
        return out


@dataclass(frozen=True, slots=True)
class Flash4(Flash2):
    """The package flash-attn-4, whose module is flash_attn.cute.

    It compiles each kind of call when it is first made, for seconds, in the steps of a warm-up.
    """

    def takes(self, block_size: int) -> bool:
        """See `Flash2.takes`."""
        return block_size < _LEAST_TILE

    def computes(self, head_dim: int, params: AttentionParams) -> bool:
        """See `Flash2.computes`; a soft cap is a function that the package reads anew in each call, on the host."""
        is_known = head_dim <= _WIDE_4 or head_dim == _WIDEST_4
        return is_known and params.soft_cap is None and Flash2.computes(self, head_dim, params)

    def fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """See `Flash2.fresh`."""
        keys = {"cu_seqlens_k": metadata.cu_seqlens_q, "max_seqlen_k": metadata.max_query_len}
        return self._call((q, k, v), metadata, params, keys)

    def paged(
        self, q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """See `Flash2.paged`."""
        keys = {"seqused_k": metadata.seq_lens, "page_table": metadata.block_tables}
        return self._call((q, *_sides(kv_layer)), metadata, params, keys | {"max_seqlen_k": metadata.max_seq_len})

    def _call(
        self,
        tensors: tuple[torch.Tensor, ...],
        metadata: AttentionMetadata,
        params: AttentionParams,
        keys: dict[str, Any],
    ) -> torch.Tensor:
        out: torch.Tensor
        out, _ = self.module.flash_attn_varlen_func(
            *tensors,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=params.scale,
            causal=True,
            window_size=(None, None) if params.sliding_window is None else (params.sliding_window - 1, 0),
            **keys,
        )
        return out


def _sides(kv_layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values `[N, S, Hkv, D]`, views of the pool."""
    return kv_layer.transpose(2, 3).unbind(1)


def _options(params: AttentionParams) -> dict[str, Any]:
    """Returns flash-attn's options; its window counts positions before and after the query's own, -1 = all."""
    return {
        "softmax_scale": params.scale,
        "causal": True,
        "window_size": (-1, -1) if params.sliding_window is None else (params.sliding_window - 1, 0),
        "softcap": params.soft_cap or 0.0,
    }


def plan_runs(query_lens: Sequence[int], seq_lens: Sequence[int], min_fresh_tokens: int) -> list[Run]:
    """Cuts a batch into runs, in order."""
    sources = [Source.FRESH if q == n else Source.PAGED for q, n in zip(query_lens, seq_lens, strict=True)]
    if Source.PAGED in sources:
        for run in _runs(sources):
            if run.source is Source.FRESH and sum(query_lens[run.first : run.end]) < min_fresh_tokens:
                sources[run.first : run.end] = [Source.PAGED] * (run.end - run.first)
    return list(_runs(sources))


def _runs(sources: Sequence[Source]) -> list[Run]:
    lengths = [(source, len(list(group))) for source, group in groupby(sources)]
    bounds = accumulate((length for _, length in lengths), initial=0)
    return [Run(source, *bound) for (source, _), bound in zip(lengths, pairwise(bounds), strict=True)]


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Implements `kernels.attention.AttentionBackend`; `other` computes what `library` does not take."""

    library: Flash2
    other: AttentionBackend
    name = "flash_attn"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        dims = check_attend(q, kv_layer, metadata, params)
        has_streams = metadata.is_padded or min(metadata.query_lens_host) <= 1  # of captured steps lengths are bounds
        if has_streams or is_quantized(kv_layer) or not self.library.computes(dims["D"], params):
            return self.other.attend(q, k, v, kv_layer, metadata, params)
        runs = plan_runs(metadata.query_lens_host, metadata.seq_lens_host, MIN_FRESH_TOKENS)
        library = self.library

        def attend(source: Source, rows: slice, metadata: AttentionMetadata) -> torch.Tensor:
            if source is Source.FRESH:
                return library.fresh(q[rows], k[rows], v[rows], metadata, params)
            if not library.takes(kv_layer.shape[3]):
                return self.other.attend(q[rows], k[rows], v[rows], kv_layer, metadata, params)
            return library.paged(q[rows], kv_layer, metadata, params)

        if len(runs) == 1:
            return attend(runs[0].source, slice(None), metadata)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts = list(accumulate(metadata.query_lens_host, initial=0))
        for run in runs:
            rows = slice(starts[run.first], starts[run.end])
            out[rows] = attend(run.source, rows, _part(metadata, run, rows))
        return out


def _part(metadata: AttentionMetadata, run: Run, rows: slice) -> AttentionMetadata:
    """What attention must know of one run; nothing is copied from the host."""
    seqs = slice(run.first, run.end)
    bounds = metadata.cu_seqlens_q[run.first : run.end + 1]
    return AttentionMetadata(
        cu_seqlens_q=bounds - bounds[:1],
        seq_lens=metadata.seq_lens[seqs],
        block_tables=metadata.block_tables[seqs],
        slot_mapping=metadata.slot_mapping[rows],
        query_lens_host=metadata.query_lens_host[seqs],
        seq_lens_host=metadata.seq_lens_host[seqs],
    )


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this back-end cannot run on `device` with `dtype`, or None."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    needed = triton.obstacle(device, dtype)
    if needed is not None:
        return f"needs Triton's kernels beside it: {needed}"
    if dtype not in _DTYPES:
        return f"computes bfloat16 and float16, not {dtype}"
    found = _find(device)
    return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class _Package:
    """A package; `wanted` names by function the arguments that are needed."""

    name: str
    module: str
    library: type[Flash2]
    wanted: Mapping[str, Sequence[str]]


_VERSION_2 = _Package(
    "flash-attn 2", "flash_attn", Flash2, {"flash_attn_varlen_func": ("block_table", "softcap", "window_size")}
)
_VERSION_3 = _Package(
    "flash-attn 3",
    "flash_attn_interface",
    Flash3,
    {"flash_attn_varlen_func": _FRESH_3, "flash_attn_with_kvcache": _PAGED_3},
)
_VERSION_4 = _Package("flash-attn 4", "flash_attn.cute", Flash4, {"flash_attn_varlen_func": _CALL_4})
_BY_CAPABILITY = {_HOPPER: (_VERSION_3, _VERSION_4), **dict.fromkeys(_BLACKWELL, (_VERSION_4, _VERSION_2))}
"""What is looked for, best first; on all other GPUs version 2."""


def _find(device: torch.device) -> tuple[_Package, Flash2] | str:
    """The package for `device`, or why none can be used: what it offers counts, not its number."""
    obstacles = []
    for package in _BY_CAPABILITY.get(torch.cuda.get_device_capability(device)[0], (_VERSION_2,)):
        module = _module(package)
        if not isinstance(module, str):
            return package, package.library(module)
        obstacles.append(module)
    return "; ".join(obstacles)


def _module(package: _Package) -> ModuleType | str:
    """The module, or why the package cannot be used."""
    try:
        module = importlib.import_module(package.module)
        for function, arguments in package.wanted.items():
            missing = set(arguments) - inspect.signature(getattr(module, function)).parameters.keys()
            if missing:
                lacks = f"{function} takes no {', '.join(sorted(missing))}"
                return f"the package {package.module} is too old or too new: {lacks}"
    except (ImportError, AttributeError) as error:  # not there, built for another torch, or another package
        return f"the package {package.module} cannot be used: {error}"
    return module


def describe(device: torch.device) -> str:
    """Which package serves `device`; `obstacle` is None."""
    found = _find(device)
    return found if isinstance(found, str) else f"{found[0].name} for prompts, Triton for the rest"


def doubt(device: torch.device) -> str | None:
    """Why this back-end serves `device` only where it is asked for, or None; `obstacle` is None."""
    found = _find(device)
    if isinstance(found, str) or found[0] is not _VERSION_4:
        return None
    return f"{found[0].name} has not been measured, --attention-backend flash_attn takes it"


def load() -> Kernels:
    """For the current device. Imports the package and Triton; call it only where `obstacle` is None."""
    found = _find(torch.device("cuda", torch.cuda.current_device()))
    if isinstance(found, str):
        raise InternalError(found)
    fallback = triton.load()
    return replace(fallback, attention=FlashAttention(found[1], fallback.attention))
