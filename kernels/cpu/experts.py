"""The mixture of experts of a layer as one native call (`src/experts.cpp`): router, choice, products and sum."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch

from kernels.cpu.library import Library
from kernels.cpu.linear import FORMS, NativeLinear
from kernels.operations import LinearMap, Routing
from kernels.spec import Dims
from tandem.errors import InternalError


def open_experts(
    library: Library,
    router: LinearMap,
    mlps: Sequence[tuple[LinearMap, LinearMap]],
    routing: Routing,
    shared_gate: LinearMap | None,
) -> NativeExperts | None:
    """See `Operations.experts`; None if not all maps are native. Raises InternalError if their sizes differ."""
    given = [router, *(each for mlp in mlps for each in mlp), *([] if shared_gate is None else [shared_gate])]
    maps = [each for each in given if isinstance(each, NativeLinear)]
    if len(maps) != len(given):
        return None
    into, out = maps[1 : 2 * len(mlps) : 2], maps[2 : 2 * len(mlps) + 1 : 2]
    return NativeExperts(library, maps[0], into, out, routing, None if shared_gate is None else maps[-1])


class _Experts(ctypes.Structure):
    """`Experts` of `src/experts.h`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("router", "gate_up", "down", "shared_gate")),
        *((name, c_int64) for name in ("experts", "active", "adds_to_one")),
    )


class NativeExperts:
    """Implements `kernels.operations.ExpertMaps`. A token's result does not depend on the others, as a map's."""

    __slots__ = ("_addresses", "_call", "_dtype", "_hidden_size", "_maps", "_struct", "experts_address")

    def __init__(
        self,
        library: Library,
        router: NativeLinear,
        gate_up: Sequence[NativeLinear],
        down: Sequence[NativeLinear],
        routing: Routing,
        shared_gate: NativeLinear | None,
    ) -> None:
        """`router` `[X, E]`; of each expert `gate_up` `[I, E]`, gated, `down` `[E, I]`; a shared one has its own I."""
        num_experts = len(gate_up) - (shared_gate is not None)
        sizes = [(each.num_inputs, each.num_outputs, each.dtype) for each in gate_up]
        ways_back = [(each.num_outputs, each.num_inputs, each.dtype) for each in down]
        wanted = [(router.num_inputs, each.num_inputs, router.dtype) for each in (down[0], down[-1])]
        wanted = wanted[:1] * num_experts + wanted[1:] * (len(gate_up) - num_experts)
        gates = {(each.num_inputs, each.num_outputs, each.dtype) for each in (shared_gate,) if each is not None}
        fits = sizes == ways_back == wanted and gates <= {(router.num_inputs, 1, router.dtype)}
        if not fits or router.num_outputs != num_experts or routing.num_active > num_experts:
            raise InternalError(f"experts: {sizes} and back {ways_back} beside a router of {router.num_outputs}")
        self._maps = (router, *gate_up, *down, shared_gate)
        self._hidden_size, self._dtype = router.num_inputs, router.dtype
        self._addresses = torch.tensor([[each.product_address for each in maps] for maps in (gate_up, down)])
        self._struct = _Experts(
            router.product_address,
            *(each.data_ptr() for each in self._addresses),
            None if shared_gate is None else shared_gate.product_address,
            *(num_experts, routing.num_active, int(routing.adds_to_one)),
        )
        self.experts_address = ctypes.addressof(self._struct)
        """Address of the struct that native code computes with; the struct lives as long as this object."""
        self._call = library.bind(f"experts_{FORMS[self._dtype][1]}", c_void_p, c_void_p, c_int64, c_int64, c_void_p)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `ExpertMaps`. Raises InternalError by name."""
        Dims(E=self._hidden_size).check("x", x, ("T", "E"), self._dtype, torch.device("cpu"))
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        self._call(self.experts_address, x.data_ptr(), x.stride(0), len(x), out.data_ptr())
        return out
