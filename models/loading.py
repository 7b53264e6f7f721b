"""From a checkpoint folder to a decoder ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.group import Group
from kernels.operations import Kernels
from kernels.quantized import QuantForm
from models.activations import PLAIN, with_activations
from models.config import CONFIG_FILE, ModelShape, load_model_config, read_config, read_dtype
from models.config_json import ConfigJson
from models.decoder import Decoder
from models.decoder_builder import DecoderBuilder, Store
from models.dtypes import torch_dtype
from models.files.gguf import find_gguf, read_gguf
from models.files.language_part import CONTAINERS, language_tensor
from models.files.read_files import ReadFiles
from models.fingerprint import fingerprint_files
from models.gguf_store import GgufStore
from models.preflight import AUTO, TRANSFORMERS, check_loadable
from models.quantization.config import read_quantization
from models.rope_config import LongRopeScaling
from models.shard import Shard, check_shared
from models.tensor_names import (
    expected_tensors,
    stacked_tensor,
)
from models.tensor_store import TensorStore
from models.weight_files import INDEX_FILE, SINGLE_FILE, find_weight_files
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout, QuantDType

if TYPE_CHECKING:
    from models.transformers_decoder import TransformersDecoder

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what must be known of it; `fingerprint` covers config, weights, their form and dtype, and whether
    products are summed by segments; not how many ranks share them.
    """

    config: ModelShape
    decoder: Decoder | TransformersDecoder
    dtype: DType
    device: torch.device
    fingerprint: str
    shard: Shard | None = None
    """The part that is loaded; None: the whole model, whose products are summed as their kernels like best."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch's form."""
        return torch_dtype(self.dtype)

    def kv_layout(self, block_size: int, kv_dtype: QuantDType | None = None) -> KvLayout:
        """How this model's KV lies in blocks of `block_size` tokens; `kv_dtype` None stores it as it is computed."""
        config = self.config
        return KvLayout(config.num_layers, config.num_kv_heads, block_size, config.head_dim, kv_dtype or self.dtype)

    def rank_layout(self, block_size: int, kv_dtype: QuantDType | None = None) -> KvLayout:
        """The same for the K/V heads that this rank computes: how blocks of its own pool lie."""
        whole = self.kv_layout(block_size, kv_dtype)
        return whole if self.shard is None else replace(whole, num_kv_heads=self.shard.num_kv_heads)


def load_model(
    path: Path,
    dtype: str | None,
    device: torch.device,
    kernels: Kernels,
    form: QuantForm | None = None,
    implementation: str = AUTO,
    context_tokens: int | None = None,
    activations: str = AUTO,
    group: Group | None = None,
) -> LoadedModel:
    """Loads the folder or GGUF file `path` onto `device` for activations of `dtype` (None or `auto`: as saved).

    Linear maps of a plain checkpoint are rounded to `form`, the output projection too, the embedding not.
    `context_tokens`: the longest sequence that is served; None = as long as the model's context.
    `activations` of long prompts: `fp8` rounds those that meet FP8 weights, `auto` where the checkpoint was made so.
    `group`: of the ranks that share the model, of which one is this process; a SoloGroup holds it whole and computes to
    the bit what ranks do. None holds it whole.
    `implementation`: `auto` is `native` for the families that it has, `transformers` for all others.
    Raises CheckpointError naming the file, key or tensor at fault, ConfigError for a bad `dtype` or `form`.
    """
    gguf = find_gguf(path)
    read = ReadFiles(*(path / name for name in (CONFIG_FILE, INDEX_FILE, SINGLE_FILE)), *([gguf] if gguf else []))
    implementation, _ = check_loadable(path, implementation)
    if implementation == TRANSFORMERS:
        if activations not in (AUTO, PLAIN):
            raise ConfigError("--activations", f"{activations} is for families computed natively: leave it out")
        if group is not None:
            check_shared(path, implementation, group.size)
        return _load_with_transformers(path, read, dtype, device, kernels, form, context_tokens)
    config = load_model_config(path, context_tokens)
    shard = None if group is None else Shard(config, group)
    store: Store
    if gguf is None:
        files = find_weight_files(path)
        read.note(*files.paths)
        written = ConfigJson.read(path / CONFIG_FILE)
        is_stacked = config.experts is not None and config.experts.names.stacked
        rename: Callable[[str], str | None] = stacked_tensor if is_stacked else str
        if written.text("model_type") in CONTAINERS:
            rename = language_tensor
        store = TensorStore(files, expected_tensors(config), read_quantization(written), rename)
    else:
        store = GgufStore(read_gguf(gguf), config)
    if store.method is not None and form is not None:
        raise ConfigError("--quantize", f"{path} is quantised already ({store.method})")
    kernels = with_activations(kernels, activations, device, is_made_so=store.rounds_activations)
    with store:
        chosen = _choose_dtype(dtype, config.dtype or store.saved_dtype())
        builder = DecoderBuilder(config, store, torch_dtype(chosen), device, kernels, form, shard)
        decoder = builder.build()
    builder.tell()
    scaling = config.rope.scaling
    takes_long = "long factors" if isinstance(scaling, LongRopeScaling) and scaling.is_long else None
    rounded = "fp8 activations" if builder.rounds else None
    sums = None if shard is None else "sums by segments"
    fingerprint = fingerprint_files(read, chosen, form, takes_long, rounded, sums)
    return LoadedModel(config, decoder, chosen, device, fingerprint, shard)


def _load_with_transformers(
    path: Path,
    read: ReadFiles,
    dtype: str | None,
    device: torch.device,
    kernels: Kernels,
    form: QuantForm | None,
    context_tokens: int | None,
) -> LoadedModel:
    from models.transformers_loading import load_decoder  # imports transformers, which takes seconds

    read.note(*find_weight_files(path).paths)
    chosen = _choose_dtype(dtype, read_dtype(read_config(path)) or DType.FLOAT32)
    decoder, shape = load_decoder(path, chosen, device, kernels, form)
    shape = replace(shape, context_tokens=min(context_tokens or shape.context_tokens, shape.context_tokens))
    _log.info("transformers runs this model, with our attention and linear maps", family=shape.family)
    fingerprint = fingerprint_files(read, chosen, form, TRANSFORMERS)  # its KV differs from ours in the last bits
    return LoadedModel(shape, decoder, chosen, device, fingerprint)


def _choose_dtype(name: str | None, saved: DType) -> DType:
    if name is None or name == AUTO:
        return saved
    if name not in set(DType):
        raise ConfigError("--dtype", f"{name!r} is not one of {', '.join((AUTO, *DType))}")
    return DType(name)
