"""Which GPU each worker of `tandem serve` gets, and how many share it.

A GPU is named as CUDA_VISIBLE_DEVICES names it: by UUID, or by number where no UUID is told. The driver's own tool
lists them: a process that asks CUDA holds a context on a GPU from then on. A worker sees its own GPU first, as
`cuda:0`, and the others behind it, since CUDA tells what two GPUs can do with each other only where both are visible.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError

OWN_GPU = "cuda:0"
"""A worker's GPU, as the worker names its own."""
_TOOL = "nvidia-smi"
_TOOL_FOLDERS = os.pathsep.join((os.defpath, "/usr/local/nvidia/bin", "/opt/bin"))
"""Where it is found if not on the path: container platforms mount it there."""
_TOOL_TIMEOUT_S = 60.0
"""Without its daemon the driver initializes each GPU first: seconds."""
_LINE = re.compile(r"\s*(GPU|MIG) .*\(UUID: ([\w/-]+)\)\s*")


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Device of a worker."""

    device: str
    """Its `--device`."""
    gpus: tuple[str, ...] = ()
    """Those that it sees, its own first; empty = those that this process sees."""
    num_workers: int = 1
    """Number of workers on the GPU, this worker included."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Device shares of the workers, in order."""

    prefill: tuple[DeviceShare, ...]
    decode: tuple[DeviceShare, ...]

    @property
    def on_gpus(self) -> bool:
        """Whether any worker has a GPU."""
        return any(share.gpus for share in (*self.prefill, *self.decode))


def find_gpus(visible: str | None, root: Path = Path("/")) -> tuple[str, ...]:
    """GPUs that this process may use; `visible` is CUDA_VISIBLE_DEVICES, None = not set."""
    num_files = len(list((root / "dev").glob("nvidia[0-9]*")))
    if not num_files:
        return ()
    listed = parse_listing(_listing()) or tuple(map(str, range(num_files)))
    return listed if visible is None else select(listed, visible)


def parse_listing(text: str) -> tuple[str, ...]:
    """UUIDs in what `nvidia-smi -L` prints. The slices of a divided GPU stand for it."""
    gpus: list[tuple[str, bool]] = []
    for kind, uuid in (found.groups() for line in text.splitlines() if (found := _LINE.fullmatch(line))):
        if kind == "MIG" and gpus and not gpus[-1][1]:
            gpus.pop()
        gpus.append((uuid, kind == "MIG"))
    return tuple(uuid for uuid, _ in gpus)


def select(gpus: Sequence[str], visible: str) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES lets CUDA see, in its order: what follows a name that is none is not seen."""
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        found = _find(gpus, name)
        if found is None:
            break
        chosen.append(found)
    return tuple(chosen)


def find_gpu(name: str, gpus: Sequence[str]) -> str:
    """Returns the GPU that `cuda:I` or the beginning of a UUID names. Raises ConfigError that names it."""
    found = _find(gpus, name.removeprefix("cuda:"))
    if found is None:
        raise ConfigError("--device", f"{name} is not here; GPUs are {', '.join(gpus) or 'none'}")
    return found


def plan_devices(gpus: Sequence[str], num_prefill: int, num_decode: int, devices: Sequence[str] = ()) -> DevicePlan:
    """Shares `gpus` out; pure. `devices`, `cpu`, `cuda:I` or a UUID each, are dealt round, prefill workers first.

    Without `devices` each worker gets a GPU of its own where they suffice; else neighbours share one, so that prefill
    and decode workers mix as little as possible. Without any GPU workers get `auto`.
    Raises ConfigError that names the device.
    """
    num_workers = num_prefill + num_decode
    if len(devices) > num_workers:
        raise ConfigError("--device", f"names {len(devices)} devices for {num_workers} workers")
    if devices:
        found = [name if name == "cpu" else find_gpu(name, gpus) for name in devices]
        dealt = [found[worker % len(found)] for worker in range(num_workers)]
    else:
        num_used = min(len(gpus), num_workers)
        dealt = [gpus[worker * num_used // num_workers] if gpus else "auto" for worker in range(num_workers)]
    on_each = Counter(dealt)

    def share(name: str) -> DeviceShare:
        if name not in gpus:
            return DeviceShare(name)
        return DeviceShare(OWN_GPU, (name, *(gpu for gpu in gpus if gpu != name)), on_each[name])

    return DevicePlan(tuple(map(share, dealt[:num_prefill])), tuple(map(share, dealt[num_prefill:])))


def _find(gpus: Sequence[str], name: str) -> str | None:
    """By number, or by a beginning that no other UUID has."""
    if re.fullmatch(r"\d{1,4}", name):
        return gpus[int(name)] if int(name) < len(gpus) else None
    matching = [gpu for gpu in gpus if name and gpu.startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _listing() -> str:
    """What the driver's tool prints; empty if there is none, or it fails."""
    tool = shutil.which(_TOOL) or shutil.which(_TOOL, path=_TOOL_FOLDERS)
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
