"""Compiles `src/` into one shared library with a copy of every kernel per instruction tier.

Needs a C++17 compiler with GCC's vector types. Knows nothing of torch, so that it runs at install time;
`python -m kernels.cpu.build` builds in place.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

_HERE = Path(__file__).resolve().parent
SOURCES = _HERE / "src"
LIBRARY = _HERE / "_native.so"
"""Where the library lies in an installed package; in a checkout, git ignores it."""

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # GCC 12 warns of its own intrinsics' undefined operands.
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_X86_TIERS = {
    "baseline": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
}
_ARM64_TIERS = {"baseline": (), "neon_bf16": ("-march=armv8.2-a+bf16",)}
_ALL_TIERS: dict[str, dict[str, tuple[str, ...]]] = {"x86_64": _X86_TIERS, "aarch64": _ARM64_TIERS}
_INTRINSICS = {"x86_64": "immintrin.h", "aarch64": "arm_neon.h"}
TIERS = tuple(_ALL_TIERS.get(platform.machine(), {"baseline": ()}))
"""Of this architecture, lowest first; each has all instructions of those before it. The library counts them so."""
_ONCE = ("decoder.cpp", "machine.cpp", "team.cpp")
"""Files that compute nothing; all others hold kernels and are compiled once per tier."""


class BuildError(Exception):
    """No compiler, or it refused; the message says which and why."""


def build(library: Path = LIBRARY, objects: Path = _HERE / "_objects") -> None:
    """Compiles what is older than its sources into the folder `objects`, and links `library`. Raises BuildError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: looked for {', '.join(_COMPILERS)}")
    objects.mkdir(parents=True, exist_ok=True)
    tiers = _tiers_of(compiler, objects)
    commands = list(_compilations(compiler, tiers, objects))
    changed = max(path.stat().st_mtime for path in (*SOURCES.glob("*.h"), Path(__file__)))
    stale = [command for command in commands if _is_stale(Path(command[-1]), Path(command[-3]), changed)]
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(_run, stale))
    # Linked beside and moved: a process that has the old library open keeps it whole.
    linked = objects / library.name
    _run([compiler, "-shared", "-Wl,--as-needed", *(command[-1] for command in commands), "-o", str(linked)])
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(linked, library.with_suffix(".new"))
    library.with_suffix(".new").replace(library)


def source_hash() -> str:
    """Names the sources as they are; the library carries the one that it was built from."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _tiers_of(compiler: str, objects: Path) -> dict[str, tuple[str, ...]]:
    """The flags of each tier that this architecture has and this compiler knows."""
    machine = platform.machine()
    if machine not in _ALL_TIERS:
        return {"baseline": ()}
    probe = objects / "probe.cpp"
    probe.write_text(f"#include <{_INTRINSICS[machine]}>\n")
    return {tier: flags for tier, flags in _ALL_TIERS[machine].items() if _accepts(compiler, flags, probe)}


def _accepts(compiler: str, flags: tuple[str, ...], probe: Path) -> bool:
    command = [compiler, *flags, "-fsyntax-only", str(probe)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compilations(compiler: str, tiers: dict[str, tuple[str, ...]], objects: Path) -> Iterator[list[str]]:
    """One command per object; they end in: source, `-o`, object."""
    # The hash is in the object's name: with other sources it is another object.
    defines = (f'-DTANDEM_BUILT_TIERS="{" ".join(tiers)}"', f'-DTANDEM_SOURCES="{source_hash()}"')
    for name in _ONCE:
        target = objects / f"{Path(name).stem}-{source_hash()}.o"
        yield [compiler, *_FLAGS, *defines, "-c", str(SOURCES / name), "-o", str(target)]
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.name not in _ONCE:
            for tier, flags in tiers.items():
                target = objects / f"{source.stem}-{tier}.o"
                yield [compiler, *_FLAGS, *flags, f"-DTANDEM_TIER={tier}", "-c", str(source), "-o", str(target)]


def _is_stale(target: Path, source: Path, changed: float) -> bool:
    return not target.exists() or target.stat().st_mtime < max(changed, source.stat().st_mtime)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(str(error))
