"""What a rank of a tensor-parallel model holds of each weight, as data.

    by rows      q, k, v (whole heads) · gate, up · output projection (vocabulary)
    by columns   o (whole heads) · down; a layer's experts are split inside each
    by head      sinks
    whole        embedding, norms, routers; a K/V head on each rank that has queries of its group

Columns are cut into segments that depend on the weight's shape and groups alone (`kernels.split_maps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from kernels.group import Group, SoloGroup
from kernels.operations import Operations
from kernels.quantized import HALF_BYTES, QuantizedWeight
from kernels.split_maps import SegmentedLinear
from models.config import ModelConfig, load_model_config
from models.preflight import TRANSFORMERS, check_loadable
from tandem.errors import ConfigError

SEGMENTS = 8
"""Segments of a product's inputs, where it has as many groups: as many ranks as there may be."""
OPTION = "--tensor-parallel"

_UNIT = 32
"""Borders of segments where no group says otherwise: what every kernel reads at once, unless the weight is tiny."""

Weight = torch.Tensor | QuantizedWeight
WeightT = TypeVar("WeightT", torch.Tensor, QuantizedWeight, Weight)
Rows = Sequence[torch.Tensor] | None
"""Rows of each stacked weight that are held; None: all rows."""


def check_shared(path: Path, implementation: str, size: int) -> None:
    """Raises ConfigError where `size` ranks cannot share the model at `path`, as far as its config says."""
    if check_loadable(path, implementation)[0] == TRANSFORMERS:
        raise ConfigError(OPTION, f"models that transformers runs cannot be split: give 1 ({path})")
    Shard(load_model_config(path), SoloGroup(0, size))


def rows_of(weight: WeightT, rows: torch.Tensor) -> WeightT:
    """Copies of `rows` of a weight or a bias."""
    return weight.rows(rows) if isinstance(weight, QuantizedWeight) else weight[rows]


def gate_up_rows(columns: range, intermediate_size: int, num_names: int) -> tuple[torch.Tensor, ...]:
    """Rows of gate and up that give the `columns` of down; of `num_names` tensors: one is both."""
    rows = torch.arange(columns.start, columns.stop)
    return (rows, rows) if num_names == 2 else (torch.cat((rows, intermediate_size + rows)),)


def segment_borders(num_inputs: int, unit: int) -> tuple[int, ...]:
    """Borders of the segments of `num_inputs` inputs, from 0 on: multiples of `unit`, as even as these allow."""
    count, units = SEGMENTS, num_inputs // unit
    while count > units:
        count //= 2
    return tuple(units * place // count * unit for place in range(count + 1))


def _unit_of(weight: Weight, shares: int) -> int:
    """Inputs between the places where `weight` may be cut; where no group says so, as many as make `shares` equal."""
    num_inputs, least, unit = _num_inputs(weight), 1, _UNIT
    if isinstance(weight, QuantizedWeight):
        if weight.group < num_inputs:
            return weight.group
        least = 2 if weight.form in HALF_BYTES else 1
    while unit > least and (num_inputs % (unit * shares) or num_inputs // unit < SEGMENTS):
        unit //= 2
    return unit


def _num_inputs(weight: Weight) -> int:
    return weight.shape[1] if isinstance(weight, torch.Tensor) else weight.num_inputs


def _columns(weight: Weight, start: int, stop: int) -> Weight:
    return weight.columns(start, stop) if isinstance(weight, QuantizedWeight) else weight[:, start:stop].contiguous()


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of rank `group.rank` of `group.size`. Raises ConfigError where that many cannot share the model."""

    config: ModelConfig
    group: Group

    def __post_init__(self) -> None:
        heads, kv_heads, size = self.config.num_heads, self.config.num_kv_heads, self.group.size
        if size not in (1, 2, 4, SEGMENTS):
            raise ConfigError(OPTION, f"{size} is none of 1, 2, 4, {SEGMENTS}")
        if heads % size:
            raise ConfigError(OPTION, f"{size} ranks cannot share {heads} heads evenly: {self._fewer(heads)}")
        if kv_heads % size and size % kv_heads:
            raise ConfigError(OPTION, f"{size} ranks cannot share {kv_heads} K/V heads: {self._fewer(kv_heads)}")

    @property
    def num_heads(self) -> int:
        """Heads of this rank."""
        return self.config.num_heads // self.group.size

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of this rank; shared heads count too."""
        return max(1, self.config.num_kv_heads // self.group.size)

    @property
    def kv_copies(self) -> int:
        """Ranks that hold the same K/V heads."""
        return max(1, self.group.size // self.config.num_kv_heads)

    @cached_property
    def heads(self) -> slice:
        """This rank's heads."""
        return slice(self.group.rank * self.num_heads, (self.group.rank + 1) * self.num_heads)

    @cached_property
    def qkv_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of this rank's q, k and v, each counted from its first."""
        head_dim, place = self.config.head_dim, self.group.rank // self.kv_copies
        q = torch.arange(self.heads.start * head_dim, self.heads.stop * head_dim)
        kv = torch.arange(place * self.num_kv_heads * head_dim, (place + 1) * self.num_kv_heads * head_dim)
        return q, kv, kv

    @property
    def fused_qkv_rows(self) -> torch.Tensor:
        """The same where the checkpoint has q, k and v one below the other."""
        head_dim, (q, k, v) = self.config.head_dim, self.qkv_rows
        first_k = self.config.num_heads * head_dim
        return torch.cat((q, first_k + k, first_k + self.config.num_kv_heads * head_dim + v))

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Borders of the ranks' rows of the output projection."""
        return tuple(self.config.vocab_size * rank // self.group.size for rank in range(self.group.size + 1))

    def borders(self, weight: Weight, name: str, *, is_of_heads: bool = False) -> tuple[int, ...]:
        """Borders of this rank's segments among all inputs of the map `name`, whose whole weight is `weight`.

        If it `is_of_heads`, inputs are those of attention's heads, and ranks have whole ones.
        """
        heads, head_dim = self.config.num_heads, self.config.head_dim
        unit = _unit_of(weight, math.gcd(heads, SEGMENTS) if is_of_heads else 1)
        every = segment_borders(_num_inputs(weight), unit)
        count = len(every) - 1
        own, rest = divmod(count, self.group.size)
        if rest:
            raise ConfigError(OPTION, f"{name} has {count} groups of inputs to share: {self._fewer(count)}")
        borders = every[self.group.rank * own : (self.group.rank + 1) * own + 1]
        ends = (self.heads.start * head_dim, self.heads.stop * head_dim)
        if is_of_heads and (borders[0], borders[-1]) != ends:
            fewer = self._fewer(self.group.size // 2)
            raise ConfigError(
                OPTION, f"{name} has groups of {unit} inputs, which two ranks' heads would share: {fewer}"
            )
        return borders

    def segmented(
        self, operations: Operations, weight: Weight, bias: torch.Tensor | None, borders: tuple[int, ...]
    ) -> SegmentedLinear:
        """The segments between `borders` of a whole weight `[out, in]` and its bias."""
        maps = []
        for start, stop in pairwise(borders):
            held = bias if start == 0 else None
            maps.append(operations.wide_linear(_columns(weight, start, stop), held))
        own = tuple(border - borders[0] for border in borders)
        return SegmentedLinear(tuple(maps), own, operations.segment_sum(maps, own))

    def _fewer(self, shared: int) -> str:
        fits = [size for size in (1, 2, 4, SEGMENTS) if size < self.group.size and shared % size == 0]
        return f"give {' or '.join(map(str, fits))}"
