"""A builder puts a decoder together from an open store of tensors: whole, or a rank's part of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from functools import cached_property, partial
from itertools import pairwise

import torch

from kernels.attention import AttentionParams
from kernels.gates import Gate
from kernels.operations import Embedding, Kernels, LinearMap, PlainEmbedding, QkNorm, Routing
from kernels.quantized import QuantForm, QuantizedWeight, dequantized, quantize, stack
from kernels.split_maps import GatheredLinear, NormedHeads, ReducedExperts, ReducedLinear
from kernels.whole_groups import WholeGroups
from models.config import ExpertConfig, ModelConfig
from models.decoder import Attention, Decoder, DecoderLayer, HeadShape, Scales
from models.expert_weights import ExpertWeights
from models.experts import MixtureOfExperts, RoutedExperts, Router, SeparateExperts, SharedExpert
from models.gguf_store import GgufStore
from models.layers import GatedMlp, NoNorm, RmsNorm
from models.rope import NoRotation, RotaryEmbedding, order_of_dims
from models.shard import Rows, Shard, gate_up_rows, rows_of
from models.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, MLP_PROJECTIONS, STACKED_PROJECTIONS, layer_prefix
from models.tensor_store import TensorStore
from shell.progress import track
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)

Store = TensorStore | GgufStore
"""Where weights come from."""


class DecoderBuilder:
    """Takes tensors from an open store and puts the decoder together, one layer at a time."""

    def __init__(
        self,
        config: ModelConfig,
        store: Store,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        form: QuantForm | None,
        shard: Shard | None,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._operations = kernels.operations
        self._form = form
        self._shard = shard
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
        if compile_step is None or self._shard is not None:  # between its products ranks meet
            return decoder
        return replace(decoder, compiled=compile_step(decoder.parts()))

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
        shard = self._shard
        if shard is not None:
            borders, rank = shard.vocabulary, shard.group.rank
            own = slice(borders[rank], borders[rank + 1])
            held = weight.rows(own) if isinstance(weight, QuantizedWeight) else weight[own]
            widths = tuple(stop - start for start, stop in pairwise(borders))
            return PlainEmbedding(embedding), GatheredLinear(self._operations.linear(held, None), shard.group, widths)
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
        config, shard = self._config, self._shard
        is_fused = config.traits.fused_qkv
        names = ("qkv_proj",) if is_fused else ("q_proj", "k_proj", "v_proj")
        rows: Rows = None
        if shard is not None:
            rows = (shard.fused_qkv_rows,) if is_fused else shard.qkv_rows
        weight, bias = self._map(tuple(f"{prefix}{name}" for name in names), rows, bias=config.qkv_bias)
        order = self._order_of_heads
        if order is not None:
            weight = weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
            bias = None if bias is None else bias[order]
        qkv, qk_norm = self._operations.linear(weight, bias), self._qk_norm(prefix) if config.traits.qk_norm else None
        output, _ = self._way_back(f"{prefix}o_proj", bias=config.output_bias, is_of_heads=True)
        if shard is not None and qk_norm is not None and qk_norm.is_whole:
            sizes = tuple(map(len, shard.qkv_rows))
            qkv = NormedHeads(qkv, qk_norm, sizes, shard.kv_copies, self._operations, shard.group)
            qk_norm = None
        return Attention(
            qkv=qkv,
            output=output,
            qk_norm=qk_norm,
            heads=self._heads,
            params=AttentionParams(
                config.score_scale,
                sliding_window,
                config.score_cap,
                self._sinks(f"{prefix}sinks") if config.traits.sinks else None,
            ),
            kernels=self._attending,
        )

    @cached_property
    def _attending(self) -> Kernels:
        """What attention computes with."""
        shard = self._shard
        if shard is None or shard.kv_copies == 1:
            return self._kernels
        groups = WholeGroups(self._kernels.attention, shard.kv_copies, shard.group.rank % shard.kv_copies)
        return replace(self._kernels, attention=groups)

    def _sinks(self, name: str) -> torch.Tensor:
        sinks = self._read(name, dtype=torch.float32)
        return sinks if self._shard is None else sinks[self._shard.heads].clone()

    @cached_property
    def _heads(self) -> HeadShape:
        """Heads that are computed here."""
        of = self._shard or self._config
        return HeadShape(of.num_heads, of.num_kv_heads, self._config.head_dim)

    @cached_property
    def _order_of_heads(self) -> torch.Tensor | None:
        """Rows of q, k and v `[(H + 2 * Hkv) * D]` in our order; None: they are."""
        config, heads = self._config, self._heads
        dims = order_of_dims(config.rope, config.head_dim, neighbours=config.traits.rotates_neighbours)  # [D]
        if torch.equal(dims, torch.arange(config.head_dim)):
            return None
        assert not config.traits.qk_norm  # whose weights would need it too
        turned = torch.arange(heads.num_heads + heads.num_kv_heads)[:, None] * config.head_dim + dims
        values = torch.arange(turned.numel(), turned.numel() + heads.num_kv_heads * config.head_dim)
        return torch.cat((turned.flatten(), values)).to(self._device)

    def _mlp(self, prefix: str) -> GatedMlp:
        config = self._config
        names = ("gate_up_proj", "down_proj") if config.traits.fused_gate_up else MLP_PROJECTIONS
        return self._gated(prefix, names, (config.intermediate_size, config.traits.activation), bias=config.mlp_bias)

    def _gated(
        self, prefix: str, names: tuple[str, ...], inside: tuple[int, Gate], *, bias: bool = False, adds: bool = True
    ) -> GatedMlp:
        """`names` of the weights that are stacked as gate and up, then of down; `inside`: I, and what gates become.

        Without `adds` the sums of a split down stay apart, by segment.
        """
        *gate_up, down = names
        back, columns = self._way_back(f"{prefix}{down}", bias=bias, adds=adds)
        rows = None if columns is None else gate_up_rows(columns, inside[0], len(gate_up))
        weight, offset = self._map(tuple(f"{prefix}{name}" for name in gate_up), rows, bias=bias)
        return GatedMlp(self._operations.gated_linear(weight, offset, inside[1]), back, inside[0])

    def _way_back(
        self, name: str, *, bias: bool, adds: bool = True, is_of_heads: bool = False
    ) -> tuple[LinearMap, range | None]:
        """The map from heads or the inside of an MLP back to E; which of its inputs are computed here, if not all."""
        weight, offset = self._map((name,), bias=bias)
        shard = self._shard
        if shard is None:
            return self._operations.linear(weight, offset), None
        borders = shard.borders(weight, name, is_of_heads=is_of_heads)
        linear = shard.segmented(self._operations, weight, offset, borders)
        return ReducedLinear(linear, shard.group) if adds else linear, range(borders[0], borders[-1])

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
        if not operations.groups_experts or self._shard is not None:  # then no more than one expert is held twice
            inside, adds = (config.intermediate_size, config.gate), self._shard is None
            mlps = tuple(self._gated(each, names, inside, adds=adds) for each in prefixes)
            return self._separate(router, mlps, shared)
        gate_up, down = (
            _stack([self._map(tuple(f"{each}{name}" for name in some), bias=False)[0] for each in prefixes])
            for some in (names[:2], names[2:])
        )
        return self._among(ExpertWeights(gate_up, down, config), router, shared)

    def _among(self, weights: ExpertWeights, router: Router, shared: SharedExpert | None = None) -> MixtureOfExperts:
        """The experts, as a grouped map where the kernels have that."""
        grouped = None if self._shard is not None else weights.grouped(self._operations)
        if grouped is not None:
            return MixtureOfExperts(RoutedExperts(router, grouped), shared)
        return self._separate(router, weights.separate(self._operations, self._shard), shared)

    def _separate(
        self, router: Router, mlps: tuple[GatedMlp, ...], shared: SharedExpert | None = None
    ) -> MixtureOfExperts:
        """Makes a single operation of router and experts where the kernels have that operation, the shared expert among
        the others.
        """
        if self._shard is not None:
            split = RoutedExperts(router, SeparateExperts(mlps))
            return MixtureOfExperts(ReducedExperts(split, self._shard.group), shared)
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

    def _map(
        self, names: tuple[str, ...], rows: Rows = None, *, bias: bool
    ) -> tuple[torch.Tensor | QuantizedWeight, torch.Tensor | None]:
        """Returns weight and bias of a linear map: those of all `names`, of each its `rows`, stacked."""
        weight = self._form_of(tuple(f"{name}.weight" for name in names), rows=rows)
        if not bias:
            return weight, None
        offsets = [self._read(f"{name}.bias") for name in names]
        return weight, torch.cat(offsets if rows is None else list(map(rows_of, offsets, rows)))

    def _form_of(
        self, names: tuple[str, ...], known: torch.Tensor | QuantizedWeight | None = None, rows: Rows = None
    ) -> torch.Tensor | QuantizedWeight:
        """The weights of `names` as one (`known`, if given), in the form that is asked for or in the checkpoint's."""
        if known is None:
            read = map(self._read_weight, names)
            weight = _stack(list(read if rows is None else map(rows_of, read, rows)))
        else:
            weight = known
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
