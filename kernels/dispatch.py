"""Which kernels exist, which work here and why the others don't; picks one set at start.

A new set is one more `_Entry` in `_REGISTRY`, best first: a probe that says what stands in
the way, and a loader that imports it only when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from kernels import cpu, flash, triton
from kernels.operations import Kernels, Rotation
from kernels.quantized import QuantForm, zero_weight
from kernels.quantized_kv import LARGEST
from shell.telemetry.logging import get_logger
from tandem.decision import decision
from tandem.errors import ConfigError, InternalError
from tandem.kv_layout import SCALE_BYTES

_log = get_logger(__name__)

AUTO = "auto"
"""The name that leaves the choice to `select_kernels`."""

_OPTION = "--attention-backend"
_TIER_OPTION = "--cpu-tier"
_CPU = "cpu"

TRIED_GROUPS = (0, 128, 64, 32, 16)
_TRIED_SHAPE = (64, 1024)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What `tandem doctor` says of one back-end; `reason` tells why it is unusable, or what it is."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """One set: `obstacle` returns why it cannot run on a device with a dtype, or None; `describe` what it is.

    `doubt` returns why it runs on a device only where it is asked for by name, or None.
    """

    name: str
    describe: Callable[[torch.device], str]
    obstacle: Callable[[torch.device, torch.dtype], str | None]
    load: Callable[[], Kernels]
    doubt: Callable[[torch.device], str | None] = lambda _: None


def _reference_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype.is_floating_point else f"needs a floating-point dtype, not {dtype}"


def _load_reference() -> Kernels:
    from kernels.reference import ReferenceBackend
    from kernels.reference_operations import ReferenceOperations

    return Kernels(ReferenceBackend(), ReferenceOperations())


_REGISTRY = (
    _Entry("flash_attn", flash.describe, flash.obstacle, flash.load, flash.doubt),
    _Entry("triton", lambda _: "compiled Triton kernels", triton.obstacle, triton.load),
    _Entry(_CPU, lambda _: cpu.describe(), cpu.obstacle, cpu.load),
    _Entry("reference", lambda _: "plain torch, any device", _reference_obstacle, _load_reference),
)


def available_backends(device: torch.device, dtype: torch.dtype = torch.float32) -> list[BackendStatus]:
    """Every set of this version, best first, and whether it runs on `device` with `dtype`."""
    obstacles = [(entry, entry.obstacle(device, dtype)) for entry in _REGISTRY]
    return [BackendStatus(each.name, why is None, why or each.describe(device)) for each, why in obstacles]


def held_forms(device: torch.device, dtype: torch.dtype) -> dict[str, dict[QuantForm, tuple[int, ...]]]:
    """By usable set and form the group sizes of quantised weights that it multiplies as they are.

    `TRIED_GROUPS` are asked for; 0 is a scale per output. Whatever is not held is dequantised when it is loaded.
    """
    held: dict[str, dict[QuantForm, tuple[int, ...]]] = {}
    for entry in (entry for entry in _REGISTRY if entry.obstacle(device, dtype) is None):
        keeps = entry.load().operations.keeps
        for form in QuantForm:
            tried = {group: zero_weight(form, _TRIED_SHAPE, group or _TRIED_SHAPE[1], dtype) for group in TRIED_GROUPS}
            held.setdefault(entry.name, {})[form] = tuple(group for group, weight in tried.items() if keeps(weight))
    return held


def taken_kv(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, ...]]:
    """By usable set the dtypes of the KV pool that it takes in steps of `dtype`: it stores one token in each."""
    sets = (entry for entry in _REGISTRY if entry.obstacle(device, dtype) is None)
    return {
        entry.name: tuple(each for each in (dtype, *LARGEST) if _stores(entry.load(), device, dtype, each))
        for entry in sets
    }


def _stores(kernels: Kernels, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    block_size, head_dim = 16, 64
    raw = torch.zeros(1, 2, 1, block_size * (head_dim + SCALE_BYTES), dtype=kv_dtype, device=device)
    strides = (*raw.stride()[:-1], head_dim, 1)
    kv_layer = raw.as_strided((1, 2, 1, block_size, head_dim), strides)  # [N, 2, Hkv, S, D], scales behind
    angles = torch.zeros(1, head_dim // 2, device=device)
    rotation = Rotation(angles.cos(), angles, torch.zeros(1, dtype=torch.int64, device=device))
    qkv = torch.zeros(1, 3, head_dim, dtype=dtype, device=device)
    try:
        kernels.operations.rotate_and_store(qkv, rotation, None, kv_layer)
    except InternalError:
        return False
    return True


def watch_compilations(device: torch.device) -> None:
    """From now on the log says so if a kernel is compiled for `device`: to be called once its engine is warm."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from kernels.triton.compilations import warn_from_now_on

        warn_from_now_on()


def select_kernels(name: str, device: torch.device, dtype: torch.dtype, cpu_tier: str | None = None) -> Kernels:
    """The kernels called `name`, or for `auto` the best usable one; with `cpu_tier`, `cpu` at that tier.

    Raises ConfigError, naming the option, if it is unknown or cannot run here.
    """
    if cpu_tier is not None:
        if name not in (AUTO, _CPU):
            raise ConfigError(_TIER_OPTION, f"{cpu_tier} is a tier of the kernels cpu, not of {name}")
        obstacle = cpu.obstacle(device, dtype, cpu_tier)
        if obstacle is not None:
            raise ConfigError(_TIER_OPTION, f"{cpu_tier} cannot run on {device}: {obstacle}")
        _log.info("kernels chosen", name=_CPU, what=f"native C++ kernels, tier {cpu_tier}, as {_TIER_OPTION} says")
        asked = decision("kernels", f"{_CPU}, tier {cpu_tier}", _TIER_OPTION, cpu_tier, "")
        return replace(cpu.load(cpu_tier), decision=asked)
    passed_over: list[str] = []
    for entry in _REGISTRY:
        if name not in (AUTO, entry.name):
            continue
        obstacle = entry.obstacle(device, dtype)
        if obstacle is None and name == AUTO:
            obstacle = entry.doubt(device)
        if obstacle is None:
            what = entry.describe(device)
            if name == AUTO:
                _log.info("kernels chosen", name=entry.name, what=what, passed_over="; ".join(passed_over))
            why = "; ".join((what, *passed_over))
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return replace(entry.load(), decision=decision("kernels", entry.name, _OPTION, name != AUTO, why))
        if name != AUTO:
            raise ConfigError(_OPTION, f"{name} cannot run on {device}: {obstacle}; leave {_OPTION} out")
        passed_over.append(f"{entry.name}: {obstacle}")
    known = ", ".join([AUTO, *(entry.name for entry in _REGISTRY)])
    raise ConfigError(_OPTION, f"{name!r} cannot be chosen on {device} with {dtype}; there are {known}")
