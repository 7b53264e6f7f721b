"""From a checkpoint folder to a decoder ready to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.attention import AttentionParams
from kernels.gates import Gate
from kernels.operations import Embedding, Kernels, LinearMap, PlainEmbedding, QkNorm, Routing
from kernels.quantized import QuantForm, QuantizedWeight, dequantized, quantize, stack
from models.activations import PLAIN, with_activations
from models.config import CONFIG_FILE, ExpertConfig, ModelConfig, ModelShape, load_model_config, read_config, read_dtype
from models.config_json import ConfigJson
from models.decoder import Attention, Decoder, DecoderLayer, HeadShape, Scales
from models.dtypes import torch_dtype
from models.expert_weights import ExpertWeights
from models.experts import MixtureOfExperts, RoutedExperts, Router, SeparateExperts, SharedExpert
from models.files.gguf import find_gguf, read_gguf
from models.files.language_part import CONTAINERS, language_tensor
from models.files.read_files import ReadFiles
from models.fingerprint import fingerprint_files
from models.gguf_store import GgufStore
from models.layers import GatedMlp, NoNorm, RmsNorm
from models.preflight import AUTO, TRANSFORMERS, check_loadable
from models.quantization.config import read_quantization
from models.rope import NoRotation, RotaryEmbedding, order_of_dims
from models.rope_config import LongRopeScaling
from models.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MLP_PROJECTIONS,
    STACKED_PROJECTIONS,
    expected_tensors,
    layer_prefix,
    stacked_tensor,
)
from models.tensor_store import TensorStore
from models.weight_files import INDEX_FILE, SINGLE_FILE, find_weight_files
from shell.progress import track
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout, QuantDType

if TYPE_CHECKING:
    from models.transformers_decoder import TransformersDecoder

_log = get_logger(__name__)

Store = TensorStore | GgufStore
"""Where weights come from."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what must be known of it; `fingerprint` covers config, weights, their form and dtype."""

    config: ModelShape
    decoder: Decoder | TransformersDecoder
    dtype: DType
    device: torch.device
    fingerprint: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch's form."""
        return torch_dtype(self.dtype)

    def kv_layout(self, block_size: int, kv_dtype: QuantDType | None = None) -> KvLayout:
        """How this model's KV lies in blocks of `block_size` tokens; `kv_dtype` None stores it as it is computed."""
        config = self.config
        return KvLayout(config.num_layers, config.num_kv_heads, block_size, config.head_dim, kv_dtype or self.dtype)


def load_model(
    path: Path,
    dtype: str | None,
    device: torch.device,
    kernels: Kernels,
    form: QuantForm | None = None,
    implementation: str = AUTO,
    context_tokens: int | None = None,
    activations: str = AUTO,
) -> LoadedModel:
    """Loads the folder or GGUF file `path` onto `device` for activations of `dtype` (None or `auto`: as saved).

    Linear maps of a plain checkpoint are rounded to `form`, the output projection too, the embedding not.
    `context_tokens`: the longest sequence that is served; None = as long as the model's context.
    `activations` of long prompts: `fp8` rounds those that meet FP8 weights, `auto` where the checkpoint was made so.
    `implementation`: `auto` is `native` for the families that it has, `transformers` for all others.
    Raises CheckpointError naming the file, key or tensor at fault, ConfigError for a bad `dtype` or `form`.
    """
    gguf = find_gguf(path)
    read = ReadFiles(*(path / name for name in (CONFIG_FILE, INDEX_FILE, SINGLE_FILE)), *([gguf] if gguf else []))
    implementation, _ = check_loadable(path, implementation)
    if implementation == TRANSFORMERS:
        if activations not in (AUTO, PLAIN):
            raise ConfigError("--activations", f"{activations} is for families computed natively: leave it out")
        return _load_with_transformers(path, read, dtype, device, kernels, form, context_tokens)
    config = load_model_config(path, context_tokens)
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
        builder = _DecoderBuilder(config, store, torch_dtype(chosen), device, kernels, form)
        decoder = builder.build()
    builder.tell()
    scaling = config.rope.scaling
    takes_long = "long factors" if isinstance(scaling, LongRopeScaling) and scaling.is_long else None
    rounded = "fp8 activations" if builder.rounds else None
    return LoadedModel(config, decoder, chosen, device, fingerprint_files(read, chosen, form, takes_long, rounded))


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


class _DecoderBuilder:
    """Takes tensors from an open store and puts the decoder together, one layer at a time."""

    def __init__(
        self,
        config: ModelConfig,
        store: Store,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        form: QuantForm | None,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._operations = kernels.operations
        self._form = form
        self._store = store
        self._read = partial(store.read, dtype=dtype, device=device)
        self._read_weight = partial(store.read_weight, dtype=dtype, device=device)
        self._forms = Counter[str]()
        self.rounds = False
        """Whether activations meet a weight in FP8 that are rounded."""

    def build(self) -> Decoder:
        """Reads everything."""
        config = self._config
        layers = tuple(self._layer(index) for index in track(range(config.num_layers), "loading weights"))
        embedding, head = self._ends()
        embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self._dtype))
        decoder = Decoder(
            embedding=embedding,
            layers=layers,
            norm=self._norm(FINAL_NORM),
            lm_head=head,
            ropes=self._ropes(),
            # The embedding's is rounded to the dtype first, as Gemma's own code has it.
            scales=Scales(embedding_scale, config.residual_scale, config.logit_divisor, config.logit_cap),
        )
        compile_step = self._kernels.compile_step
        return decoder if compile_step is None else replace(decoder, compiled=compile_step(decoder.parts()))

    def _ropes(self) -> tuple[RotaryEmbedding, ...]:
        """The rotation of most layers first; the second, if any, is the other layers' rotation."""
        config, device = self._config, self._device
        ropes = [RotaryEmbedding(config.rope, config.head_dim, device)]
        if config.local_rope is not None:
            ropes.append(RotaryEmbedding(config.local_rope, config.head_dim, device))
        elif not all(config.rotated):
            ropes.append(NoRotation(config.rope, config.head_dim, device))
        return tuple(ropes)

    def _ends(self) -> tuple[Embedding, LinearMap]:
        """Embedding and output projection; where they are tied and neither is rounded, they share what is packed."""
        embedding = self._read(EMBEDDING)
        weight = self._head(embedding)
        head = self._operations.linear(weight, None)
        tied = self._operations.tied_embedding(head) if weight is embedding else None
        return tied or PlainEmbedding(embedding), head

    def _head(self, embedding: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        """The output projection; that of a tied model is the embedding as it is stored."""
        if not self._config.tied:
            return self._form_of((LM_HEAD,))
        return self._form_of((EMBEDDING,), None if self._store.is_quantized(EMBEDDING) else embedding)

    def tell(self) -> None:
        """Logs in which forms weights are held, if any was quantised."""
        method = self._store.method or (self._form and f"--quantize {self._form}")
        if method:
            forms = ", ".join(f"{form}: {count}" for form, count in self._forms.items())
            _log.info("weights quantised", method=method, linear_maps=forms)
        if self._store.rounds_activations and not self.rounds:
            _log.info("activations are multiplied as they are, not rounded to 8 bits as the checkpoint allows")

    def _layer(self, index: int) -> DecoderLayer:
        prefix, config = layer_prefix(index), self._config
        norms = [self._norm(f"{prefix}{name}.weight") if name else NoNorm() for name in astuple(config.traits.norms)]
        is_local = config.local_rope is not None and config.windows[index] is not None
        return DecoderLayer(
            attention_norm=norms[0],
            attention=self._attention(f"{prefix}self_attn.", config.windows[index]),
            mlp_norm=norms[2],
            mlp=self._mixture(prefix, config.experts)
            if config.experts is not None and config.experts.layers[index]
            else self._mlp(f"{prefix}mlp."),
            attention_post_norm=norms[1],
            mlp_post_norm=norms[3],
            rope=int(is_local or not config.rotated[index]),
        )

    def _attention(self, prefix: str, sliding_window: int | None) -> Attention:
        config = self._config
        names = ("qkv_proj",) if config.traits.fused_qkv else ("q_proj", "k_proj", "v_proj")
        weight, bias = self._map(tuple(f"{prefix}{name}" for name in names), bias=config.qkv_bias)
        order = self._order_of_heads
        if order is not None:
            weight = weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
            bias = None if bias is None else bias[order]
        return Attention(
            qkv=self._operations.linear(weight, bias),
            output=self._linear((f"{prefix}o_proj",), bias=config.output_bias),
            qk_norm=self._qk_norm(prefix) if config.traits.qk_norm else None,
            heads=HeadShape(config.num_heads, config.num_kv_heads, config.head_dim),
            params=AttentionParams(
                config.score_scale,
                sliding_window,
                config.score_cap,
                self._read(f"{prefix}sinks", dtype=torch.float32) if config.traits.sinks else None,
            ),
            kernels=self._kernels,
        )

    @cached_property
    def _order_of_heads(self) -> torch.Tensor | None:
        """Rows of q, k and v `[(H + 2 * Hkv) * D]` in our order; None: they are."""
        config = self._config
        dims = order_of_dims(config.rope, config.head_dim, neighbours=config.traits.rotates_neighbours)  # [D]
        if torch.equal(dims, torch.arange(config.head_dim)):
            return None
        assert not config.traits.qk_norm  # whose weights would need it too
        turned = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * config.head_dim + dims
        values = torch.arange(turned.numel(), turned.numel() + config.num_kv_heads * config.head_dim)
        return torch.cat((turned.flatten(), values)).to(self._device)

    def _mlp(self, prefix: str) -> GatedMlp:
        config = self._config
        names = ("gate_up_proj", "down_proj") if config.traits.fused_gate_up else MLP_PROJECTIONS
        return self._gated(prefix, names, (config.intermediate_size, config.traits.activation), bias=config.mlp_bias)

    def _gated(self, prefix: str, names: tuple[str, ...], inside: tuple[int, Gate], *, bias: bool = False) -> GatedMlp:
        """`names` of the weights that are stacked as gate and up, then of down; `inside`: I, and what gates become."""
        *gate_up, down = names
        weight, offset = self._map(tuple(f"{prefix}{name}" for name in gate_up), bias=bias)
        into = self._operations.gated_linear(weight, offset, inside[1])
        return GatedMlp(into, self._linear((f"{prefix}{down}",), bias=bias), inside[0])

    def _mixture(self, prefix: str, config: ExpertConfig) -> MixtureOfExperts:
        """Routers and gates keep the form that the checkpoint has them in: they are small, and choose."""
        operations, names = self._operations, config.names.projections
        prefix = f"{prefix}{config.names.block}."
        router_name = f"{prefix}{config.names.router}"
        router_bias = self._read(f"{router_name}.bias") if config.names.stacked else None
        router = Router(
            operations.linear(self._read_weight(f"{router_name}.weight"), router_bias),
            Routing(config.num_active, config.adds_to_one),
        )
        if config.names.stacked:
            return self._among(self._stacked(f"{prefix}experts.", config), router)
        shared = None
        if config.shared_intermediate_size is not None:
            gate = operations.linear(self._read_weight(f"{prefix}shared_expert_gate.weight"), None)
            mlp = self._gated(f"{prefix}shared_expert.", names, (config.shared_intermediate_size, config.gate))
            shared = SharedExpert(mlp, gate)
        prefixes = [f"{prefix}experts.{expert}." for expert in range(config.num_experts)]
        if not operations.groups_experts:  # then no more than one expert is held twice
            mlps = tuple(self._gated(each, names, (config.intermediate_size, config.gate)) for each in prefixes)
            return self._separate(router, mlps, shared)
        gate_up, down = (
            _stack([self._map(tuple(f"{each}{name}" for name in some), bias=False)[0] for each in prefixes])
            for some in (names[:2], names[2:])
        )
        return self._among(ExpertWeights(gate_up, down, config), router, shared)

    def _among(self, weights: ExpertWeights, router: Router, shared: SharedExpert | None = None) -> MixtureOfExperts:
        """The experts in one map where the kernels group them."""
        grouped = weights.grouped(self._operations)
        if grouped is not None:
            return MixtureOfExperts(RoutedExperts(router, grouped), shared)
        return self._separate(router, weights.separate(self._operations), shared)

    def _separate(
        self, router: Router, mlps: tuple[GatedMlp, ...], shared: SharedExpert | None = None
    ) -> MixtureOfExperts:
        """Makes a single operation of router and experts where the kernels have that operation, the shared expert among
        the others.
        """
        maps = [(mlp.gate_up, mlp.down) for mlp in (*mlps, *([] if shared is None else [shared.mlp]))]
        gate = None if shared is None else shared.gate
        fused = self._operations.experts(router.scores, maps, router.routing, gate)
        if fused is not None:
            return MixtureOfExperts(fused)
        return MixtureOfExperts(RoutedExperts(router, SeparateExperts(mlps)), shared)

    def _stacked(self, prefix: str, config: ExpertConfig) -> ExpertWeights:
        names = [f"{prefix}{name}" for name in STACKED_PROJECTIONS]
        gate_up, down = ((self._read_weight(f"{name}.weight"), self._read(f"{name}.bias")) for name in names)
        return ExpertWeights.of_stacked(gate_up, down, config, partial(self._form_of, (f"{names[0]}.weight",)))

    def _linear(self, names: tuple[str, ...], *, bias: bool) -> LinearMap:
        return self._operations.linear(*self._map(names, bias=bias))

    def _map(self, names: tuple[str, ...], *, bias: bool) -> tuple[torch.Tensor | QuantizedWeight, torch.Tensor | None]:
        """Returns weight and bias of a linear map: those of all `names`, stacked."""
        weight = self._form_of(tuple(f"{name}.weight" for name in names))
        return weight, torch.cat([self._read(f"{name}.bias") for name in names]) if bias else None

    def _form_of(
        self, names: tuple[str, ...], known: torch.Tensor | QuantizedWeight | None = None
    ) -> torch.Tensor | QuantizedWeight:
        """The weights of `names` as one (`known`, if given), in the form that is asked for or in the checkpoint's."""
        weight = _stack([self._read_weight(name) for name in names]) if known is None else known
        if self._form is not None and isinstance(weight, torch.Tensor):
            weight = quantize(weight, self._form)
        if isinstance(weight, QuantizedWeight):
            is_kept = self._operations.keeps(weight)
            self.rounds |= self._operations.rounds(weight)
            label = f"{weight.form} by {weight.group}" + ("" if is_kept else ", dequantised for these kernels")
        else:
            label = "plain" if known is not None or not any(map(self._store.is_quantized, names)) else "dequantised"
        self._forms[label] += 1
        return weight

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._norm_weight(name), self._config.rms_norm_eps, self._operations)

    def _norm_weight(self, name: str) -> torch.Tensor:
        """A wide weight stays float32, as it is not rounded in the families' own code."""
        weight = self._read(name, dtype=torch.float32) if self._config.traits.wide_norms else self._read(name)
        return 1 + weight if self._config.traits.norm_offset else weight

    def _qk_norm(self, prefix: str) -> QkNorm:
        config = self._config
        q_weight, k_weight = (self._norm_weight(f"{prefix}{name}.weight") for name in ("q_norm", "k_norm"))
        return QkNorm(q_weight, k_weight, config.rms_norm_eps, config.traits.whole_qk_norm)


def _stack(weights: list[torch.Tensor | QuantizedWeight]) -> torch.Tensor | QuantizedWeight:
    """Weights by rows as one, such as q, k and v of one layer; plain if no form holds them all."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    stacked = stack(quantized) if quantized and len(quantized) == len(weights) else None
    return torch.cat([dequantized(weight) for weight in weights]) if stacked is None else stacked
