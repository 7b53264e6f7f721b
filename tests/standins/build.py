"""Compiles the stand-ins for libraries that need a GPU, once per content, into a folder of this user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread")


def obstacle() -> str | None:
    """Why nothing can be built here; None = it can."""
    if _compiler() is None:
        return f"no C compiler: looked for {', '.join(_COMPILERS)}"
    return None if cuda_headers() else "no cuda.h: it comes with the triton package"


def built(name: str) -> Path:
    """The compiled `NAME.c` of this folder, which may include `cuda.h`. Skips the test if it cannot be built."""
    compiler, headers = _compiler(), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip(str(obstacle()))
    source = _HERE / f"{name}.c"
    command = [compiler, *_FLAGS, f"-I{headers}", str(source), "-o"]
    key = hashlib.sha256(" ".join(command).encode() + source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"tandem-standins-{os.getuid()}")
    library = folder / f"{name}-{key}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder / f"{name}-{key}.{os.getpid()}"
        subprocess.run([*command, str(made)], check=True)
        made.replace(library)  # whole or not at all: several test processes build at the same time
    return library


def cuda_headers() -> Path | None:
    """The folder with NVIDIA's `cuda.h`, as triton brings it; None = it is not installed."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    headers = Path(found.origin).parent / "backends/nvidia/include"
    return headers if (headers / "cuda.h").exists() else None


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)
