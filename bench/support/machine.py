"""What a figure was taken on: processor, tier of our kernels, cores, versions, date; and the record of a bench."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kernels.cpu import library

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "uvloop")
_QUERIES = {
    "driver": "driver_version",
    "clock_sm": "clocks.sm",
    "clock_sm_max": "clocks.max.sm",
    "clock_memory": "clocks.mem",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}
_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def describe_machine() -> dict[str, str]:
    """This machine and what runs on it, in words."""
    facts = _cpuinfo()
    flags = facts.get("flags", "").split()
    return {
        "processor": facts.get("model name", platform.processor()),
        "vectors": next((feature for feature in _FEATURES if feature in flags), "unknown"),
        "tier": cpu_tier(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
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


def cpu_tier() -> str:
    """The highest tier of the native kernels that runs here; `reference` where none does."""
    return library.best_tier() or "reference"


def today() -> str:
    """The date of a record, UTC."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def write_record(stem: str, results: dict[str, Any]) -> None:
    """Writes `bench/results/<stem>.json` with machine and date. `python -m bench.report` renders the pages from it."""
    record = {"date": today(), "machine": describe_machine(), "results": results}
    (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
