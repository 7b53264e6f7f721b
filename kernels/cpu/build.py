"""Compiles `src/` into shared libraries: one per instruction tier, and one that all of them use.

A library's name has the hash of the sources, so that one of other sources is never opened. Needs a C++17 compiler with
GCC's vector types. Knows nothing of torch, so that it runs at install time; `python -m kernels.cpu.build` builds this
processor's best tier in place, with `--all` every tier, for other processors.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kernels.cpu.tiers import MACHINE, TIERS, machine_tiers

FOLDER = Path(__file__).resolve().parent
"""Where the libraries lie in an installed package; in a checkout, git ignores them."""
SOURCES = FOLDER / "src"
COMMON = "common"
"""What is named like a tier but is the library that all tiers use: it computes nothing."""

_COMMON_SOURCES = ("decoder.cpp", "team.cpp")
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-warning-option"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 warns of its own intrinsics' undefined operands
)


class BuildError(Exception):
    """No compiler, or it refused, or its work cannot be kept; the message says which and why."""


def library_path(part: str, folder: Path | None = None) -> Path:
    """Returns the path of the library of a tier or of `COMMON`, named by the present sources. A file at that path is
    whole.
    """
    return (folder or FOLDER) / f"_native-{part}-{source_hash()}.so"


def build(
    tiers: Iterable[str], folder: Path | None = None, announce: Callable[[Sequence[str]], object] | None = None
) -> None:
    """Compiles what `folder` lacks of `tiers` and of `COMMON`; first tells `announce` what that is. Raises BuildError.

    Of several processes that want the same, one compiles and the others wait.
    """
    folder = folder or FOLDER
    libraries = {part: library_path(part, folder) for part in (COMMON, *tiers)}
    if all(library.exists() for library in libraries.values()):
        return  # the folder need not be writable
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: looked for {', '.join(_COMPILERS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder), tempfile.TemporaryDirectory() as objects:
            missing = {part: library for part, library in libraries.items() if not library.exists()}
            if missing and announce is not None:
                announce(tuple(missing))
            _compile(compiler, missing, Path(objects), folder)
    except OSError as error:
        raise BuildError(f"{folder}: {error}") from error


def build_best(folder: Path | None = None) -> None:
    """Builds the highest tier that this machine runs and the compiler knows. Raises BuildError, of the highest."""
    errors = []
    for tier in reversed(machine_tiers()):
        try:
            return build((tier,), folder)
        except BuildError as error:
            errors.append(error)
    raise errors[0]


def source_hash() -> str:
    """Returns a hash of the sources and the architecture."""
    digest = hashlib.sha256(MACHINE.encode())
    for path in sorted([*SOURCES.iterdir(), Path(__file__), Path(__file__).with_name("tiers.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that build in `folder` waiting."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, libraries: Mapping[str, Path], objects: Path, folder: Path) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_run, [command for part in libraries for command in _compilations(compiler, part, objects)]))
    for part, library in libraries.items():
        if library != library_path(part, folder):
            raise BuildError("the sources changed while they were compiled: build them again")
        linked = folder / f"_native-{part}.new"
        _run([compiler, "-shared", "-Wl,--as-needed", *map(str, objects.glob(f"*-{part}.o")), "-o", str(linked)])
        linked.replace(library)
    for old in folder.glob("_native*.so"):
        if source_hash() not in old.name:
            old.unlink()  # a process that has it open keeps it whole


def _compilations(compiler: str, part: str, objects: Path) -> Iterator[list[str]]:
    tier_flags = () if part == COMMON else (*TIERS[part].flags, f"-DTANDEM_TIER={part}")
    for source in sorted(SOURCES.glob("*.cpp")):
        if (source.name in _COMMON_SOURCES) == (part == COMMON):
            target = objects / f"{source.stem}-{part}.o"
            yield [compiler, *_FLAGS, *tier_flags, "-c", str(source), "-o", str(target)]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)


def main() -> None:
    """Builds in place."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Compiles the native CPU kernels.")
    parser.add_argument("--all", action="store_true", help="every tier; without it, this processor's best")
    try:
        build(TIERS) if parser.parse_args().all else build_best()
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
