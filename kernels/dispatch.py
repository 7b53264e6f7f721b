"""Which kernels exist, which work here and why the others don't; picks one set at start.

A new set is one more `_Entry` in `_REGISTRY`, best first: a probe that says what stands in
the way, and a loader that imports it only when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import cpu, flash, triton
from kernels.operations import Kernels
from tandem.errors import ConfigError
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

AUTO = "auto"
"""The name that leaves the choice to `select_kernels`."""

_OPTION = "--attention-backend"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What `tandem doctor` says of one back-end; `reason` tells why it is unusable, or what it is."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """One set: `obstacle` returns why it cannot run on a device with a dtype, or None; `describe` what it is."""

    name: str
    describe: Callable[[], str]
    obstacle: Callable[[torch.device, torch.dtype], str | None]
    load: Callable[[], Kernels]


def _reference_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype.is_floating_point else f"needs a floating-point dtype, not {dtype}"


def _load_reference() -> Kernels:
    from kernels.reference import ReferenceBackend
    from kernels.reference_operations import ReferenceOperations

    return Kernels(ReferenceBackend(), ReferenceOperations())


_REGISTRY = (
    _Entry("flash_attn", lambda: "the package flash-attn, with Triton for the rest", flash.obstacle, flash.load),
    _Entry("triton", lambda: "compiled Triton kernels", triton.obstacle, triton.load),
    _Entry("cpu", cpu.describe, cpu.obstacle, cpu.load),
    _Entry("reference", lambda: "plain torch, any device", _reference_obstacle, _load_reference),
)


def available_backends(device: torch.device, dtype: torch.dtype = torch.float32) -> list[BackendStatus]:
    """Every set of this version, best first, and whether it runs on `device` with `dtype`."""
    obstacles = [(entry, entry.obstacle(device, dtype)) for entry in _REGISTRY]
    return [BackendStatus(each.name, why is None, why or each.describe()) for each, why in obstacles]


def select_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels called `name`, or for `auto` the best usable one.

    Raises ConfigError, naming `--attention-backend`, if it is unknown or cannot run here.
    """
    passed_over: list[str] = []
    for entry in _REGISTRY:
        if name not in (AUTO, entry.name):
            continue
        obstacle = entry.obstacle(device, dtype)
        if obstacle is None:
            if name == AUTO:
                _log.info("kernels chosen", name=entry.name, what=entry.describe(), passed_over="; ".join(passed_over))
            return entry.load()
        if name != AUTO:
            raise ConfigError(_OPTION, f"{name} cannot run on {device}: {obstacle}")
        passed_over.append(f"{entry.name}: {obstacle}")
    known = ", ".join([AUTO, *(entry.name for entry in _REGISTRY)])
    raise ConfigError(_OPTION, f"{name!r} cannot be chosen on {device} with {dtype}; there are {known}")
