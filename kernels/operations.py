"""The door of every operation that is not attention: linear maps, norms, rotation with KV store, gated activation,
and copies of whole blocks.

Dimensions as in `kernels.attention`; E hidden. One implementation per device (`reference`, `cpu`,
`triton`); all state is in the arguments or in what `linear` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch.nn import functional as F

from kernels.attention import AttentionBackend
from kernels.gate_products import gate_product
from kernels.gates import Activation, Gate
from kernels.grouped import GroupedMap
from kernels.quantized import QuantizedWeight
from kernels.sampling import RowMaximum, Sampler
from tandem.decision import Decision

if TYPE_CHECKING:
    from kernels.compiled_step import CompiledStep, DecoderParts


class LinearMap(Protocol):
    """A weight in the form that its implementation reads fastest."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts: softmax over the scores of all, then the highest."""

    num_active: int
    """K: experts of a token."""
    adds_to_one: bool
    """The shares of those K do; else they are what softmax over all gave them."""


class ExpertMaps(Protocol):
    """A router and its gated MLPs as a single operation."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, E]` → what each token's experts make of it, by their shares, added in ascending order: float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """A weight as it came, multiplied by torch: cuBLAS on a GPU, oneDNN or MKL on a CPU."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""
        return F.linear(x, self.weight, self.bias)


class Embedding(Protocol):
    """Rows of a table."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids `[T]` int64 → rows `[T, E]`."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainEmbedding:
    """A table of its own."""

    table: torch.Tensor  # [V, E]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids `[T]` int64 → rows `[T, E]`."""
        return F.embedding(token_ids, self.table)


@dataclass(frozen=True, slots=True)
class ActivatedLinear:
    """A linear map and, as an operation of its own, the activation of what comes out."""

    linear: LinearMap
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out of the activation]`."""
        return self.activation(self.linear(x))


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm of each head of q and of k before the rotation (Qwen3), or of all heads of a row as one (OLMo 2)."""

    q_weight: torch.Tensor
    """`[D]`, or `[H * D]` of all heads; may be wider than q, as weights of `Operations.rms_norm` may be."""
    k_weight: torch.Tensor
    """`[D]` or `[Hkv * D]`."""
    eps: float
    is_whole: bool = False
    """Whether a norm spans all heads of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What `rotate_and_store` does to the tokens of one step, the same in every layer that turns by these angles."""

    cos: torch.Tensor
    """`[T, D / 2]` float32, as `sin`."""
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    """`[T]` int64: `block_id * S + offset` where K and V go; a negative slot is skipped."""


class Operations(Protocol):
    """What a decoder layer does besides attention. Sums of squares and angles are taken in float32 or wider.

    A set inherits this, and with it what no operation of its own would make faster.
    """

    @property
    def name(self) -> str:
        """The name in the log and in `tandem doctor`."""

    def keeps(self, weight: QuantizedWeight) -> bool:
        """Whether `linear` and `gated_linear` multiply `weight` as it is; else they dequantise it once."""

    def rounding(self, device: torch.device) -> Operations | None:
        """Returns the same operations with the activations of long prompts rounded to FP8, for weights that `rounds`
        names; None where `device` or the set multiplies no FP8 by FP8.
        """
        return None

    def rounds(self, weight: QuantizedWeight) -> bool:
        """Whether `linear` rounds the activations that meet `weight` in long prompts."""
        return False

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """Packs `weight` `[out, in]` once, for `x @ weight.T + bias`; `bias` `[out]`."""

    def tied_embedding(self, linear: LinearMap) -> Embedding | None:
        """The rows of the plain weight that `linear` packed; None where that is held as it came."""
        return None

    def gated_linear(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, gate: Gate = Activation.SILU
    ) -> LinearMap:
        """Packs `weight` `[2 * I, E]` once, gates first, for activated gates times ups: `[T, E]` → `[T, I]`.

        Two operations, so gate and up are rounded too, unless a set has one.
        """
        return ActivatedLinear(self.linear(weight, bias), gate_product(gate, self.silu_mul))

    groups_experts: ClassVar[bool] = False
    """Whether `grouped_linear` makes maps at all; a layer's experts are put one below the other for it."""

    def grouped_linear(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, num_experts: int
    ) -> GroupedMap | None:
        """Returns one map of the weights of X experts, one below the other: `[X * out, in]`, `bias` `[X, out]`.

        None where one map after the other is to multiply them.
        """
        return None

    def experts(
        self,
        router: LinearMap,
        mlps: Sequence[tuple[LinearMap, LinearMap]],
        routing: Routing,
        shared_gate: LinearMap | None = None,
    ) -> ExpertMaps | None:
        """Returns one map of scores `[X, E]` and each expert's `gated_linear` and `linear`, or None if one map gains
        nothing. With `shared_gate` `[1, E]` the last of `mlps` is the expert that every token has, scaled by the
        sigmoid of that gate.
        """
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square norm (arXiv 1910.07467) of x `[T, E]`, times `weight` `[E]` → `[T, E]`.

        A float32 weight of a narrower x is multiplied before anything is rounded.
        """

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x `[T, E]` to `residual` `[T, E]` in place; returns `rms_norm` of the sum."""

    def rotate_and_store(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, kv_layer: torch.Tensor
    ) -> None:
        """Norms (if asked) and rotates q and k within `qkv` `[T, H + 2 * Hkv, D]`, in place; stores k and v.

        Element i of a head pairs with i + D / 2. KV goes into `kv_layer` `[N, 2, Hkv, S, D]`, a strided view.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` for `gate_up` `[T, 2 * I]`, gate first → `[T, I]`."""

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copies whole blocks within `pool` `[N, block_bytes]` uint8, in place, by `pairs` `[M, 2]` int64.

        A pair is (source, target). No target may be the source or target of another pair: they are copied in no order.
        """


@dataclass(frozen=True, slots=True)
class Kernels:
    """All that a device computes with, chosen together at start."""

    attention: AttentionBackend
    operations: Operations
    sampler: Sampler | None = None
    """Draws tokens in kernels of its own; None leaves it to `engine.sampler`."""
    row_max: RowMaximum | None = None
    """Serves rows that only want their best token; None leaves them to `engine.row_scan`."""
    take_thread: Callable[[], None] | None = None
    """Makes the calling thread the one that steps: torch computes alone on it, and its other threads rest."""
    full_tokens: int | None = None
    """Prompt tokens of a step beyond which more do not make any of them cheaper; None = not known."""
    compile_step: Callable[[DecoderParts], CompiledStep | None] | None = None
    """Makes one call of a decoder's step; None, or what returns None, leaves it to the operations one by one."""
    decision: Decision | None = None
    """Why these were chosen; None = they were not, but loaded by name."""

    @property
    def name(self) -> str:
        """The name in `--attention-backend`."""
        return self.attention.name
