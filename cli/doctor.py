"""`tandem doctor`: what this machine offers, which kernels and transports work here, and why others don't.

Says what it can where torch is missing, as on a router's or a client's machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import ConsoleRenderable, Group
from rich.padding import Padding

import tandem
from cli.command import Subparsers, add_command
from cli.model_report import model_rows
from cli.terminal import open_console, plain, print_whole, table
from shell.config import DecodeConfig, add_arguments, environment, load
from shell.core_order import neighbouring_cores
from shell.cores import plan_cores
from shell.gpus import find_gpus, plan_devices

_LIBRARIES = (
    *("grpcio", "protobuf", "tokenizers", "uvloop", "opentelemetry-sdk"),
    *("torch", "safetensors", "numpy", "xxhash", "transformers", "triton", "flash-attn", "flash_attn_3"),
)
_NEEDS_TORCH = "needs torch, which is not installed here: install the extra `worker`"
PACKAGES = (
    *("cli", "router", "worker", "prefill_worker", "decode_worker", "engine", "kvtransfer", "models", "kernels"),
    *("tandem", "shell", "simulator"),
)
"""All that an installation brings, at the top level."""
_GIB = 1024**3


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "doctor",
        run,
        "Changes nothing and calls no server. With --model or --config it says whether that model can be served, and "
        "what it takes at the options of a decode worker, which it takes too.",
    )
    add_arguments(parser, DecodeConfig)


def run(namespace: argparse.Namespace) -> int:
    """Prints the report. Raises CheckpointError, ConfigError if the model that is asked about cannot be served."""
    if namespace.model is not None or namespace.config is not None:
        print_whole(open_console(), table(("model", ""), model_rows(load(DecodeConfig, namespace))))
        return 0
    parts: dict[str, ConsoleRenderable] = {
        "machine": Group(*map(plain, (*_machine(), *shadowed(PACKAGES)))),
        "libraries": table(("library", "version"), [(name, _version(name)) for name in _LIBRARIES]),
        **_compute_parts(),
    }
    console = open_console()
    for title, part in parts.items():
        print_whole(console, title, Padding(part, (0, 0, 1, 2), expand=False))
    return 0


def _machine() -> Iterator[str]:
    cores = neighbouring_cores()
    plan = plan_cores(cores, 1, 1, None)
    prefill, decode = (",".join(map(str, shares[0].cores)) for shares in (plan.prefill, plan.decode))
    yield f"tandem {tandem.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"cores usable: {len(cores)} of {os.cpu_count()}"
    yield (
        f"`tandem serve --prefill 1 --decode 1` would give its prefill worker cores {prefill} and its decode worker "
        f"cores {decode}"
    )
    yield f"memory: {_memory()}"
    gpus = find_gpus(environment().get("CUDA_VISIBLE_DEVICES"))
    yield f"GPUs usable: {', '.join(gpus) or 'none'}"
    if gpus:
        shares = plan_devices(gpus, 1, 1)
        own = (shares.prefill[0].gpus[0], shares.decode[0].gpus[0])
        yield "`tandem serve --prefill 1 --decode 1` would give its prefill worker {} and its decode worker {}".format(
            *own
        )


def shadowed(packages: Iterable[str]) -> Iterator[str]:
    """A line for each package of Tandem's that would be imported from elsewhere: they are top-level packages."""
    home = Path(tandem.__file__).parents[1]
    for name in packages:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else None
        if found != home:
            where = "is not installed" if found is None else f"is imported from {found}"
            yield (
                f"shadowed: the package `{name}` {where}, Tandem lies in {home}: give Tandem an environment of its "
                "own, and start it in another folder"
            )


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    except (ValueError, OSError, AttributeError):
        return "not known on this system"
    return f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compute_parts() -> dict[str, ConsoleRenderable]:
    try:
        import torch
    except ModuleNotFoundError:
        return dict.fromkeys(
            ("devices", "attention", "quantised weights", "KV pools", "transports"), plain(_NEEDS_TORCH)
        )
    from kernels import dispatch
    from kvtransfer import transports

    gpus = {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    devices = {"cpu": f"{torch.get_num_threads()} threads by default", **gpus}
    attention = [
        (device, str(dtype).removeprefix("torch."), *_verdict(status))
        for device in devices
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for status in dispatch.available_backends(torch.device(device), dtype)
    ]
    held = [
        (device, name, str(form), ", ".join(str(size) if size else "by output" for size in groups) or "dequantised")
        for device in devices
        for name, forms in dispatch.held_forms(torch.device(device), torch.bfloat16).items()
        for form, groups in forms.items()
    ]
    pools = [
        (device, name, ", ".join(str(each).removeprefix("torch.") for each in dtypes))
        for device in devices
        for name, dtypes in dispatch.taken_kv(torch.device(device), torch.bfloat16).items()
    ]
    moves = [(device, *_verdict(status)) for device in devices for status in transports.available(device)]
    return {
        "devices": table(("device", "what"), list(devices.items())),
        "attention": table(("device", "dtype", "back-end", "works", "why"), attention),
        "quantised weights": table(("device", "back-end", "form", "scales by"), held),
        "KV pools": table(("device", "back-end", "in steps of bfloat16 takes"), pools),
        "transports": table(("KV pool on", "transport", "works", "why"), moves),
    }


def _verdict(status: Any) -> tuple[str, str, str]:
    return status.name, "yes" if status.usable else "no", status.reason
