"""What GPU a figure was taken on: name, memory, driver, clocks, versions."""

from __future__ import annotations

import shutil
import subprocess

import torch

_QUERIES = {
    "driver": "driver_version",
    "clock_sm": "clocks.sm",
    "clock_sm_max": "clocks.max.sm",
    "clock_memory": "clocks.mem",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}


def describe_gpu(device: torch.device) -> dict[str, str]:
    """In words; what nvidia-smi alone knows is left out where it is not there or will not answer."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory_gib": f"{properties.total_memory / (1 << 30):.1f}",
        "cuda": str(torch.version.cuda),
        **query_smi(),
    }


def query_smi() -> dict[str, str]:
    """Driver, clocks at this moment, power limit, temperature; empty without nvidia-smi."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return {}
    command = [path, f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    values = done.stdout.strip().split(", ")
    return dict(zip(_QUERIES, values, strict=True)) if len(values) == len(_QUERIES) else {}
