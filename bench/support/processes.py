"""Processes of a cluster as the kernel sees them: which ones `tandem serve` started, and what each of them holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds."""

    pid: int
    descriptors: int
    threads: int
    rss_bytes: int
    shared_mappings: int
    """Of memory that has a descriptor, such as the pools of peers."""


def usage(pid: int) -> Usage | None:
    """None if there is no such process any more."""
    folder = _PROC / str(pid)
    try:
        descriptors = len(os.listdir(folder / "fd"))
        threads = len(os.listdir(folder / "task"))
        pages = int((folder / "statm").read_text().split()[1])
        shared_mappings = (folder / "maps").read_text().count("/memfd:")
    except OSError:
        return None
    return Usage(pid, descriptors, threads, pages * _PAGE_BYTES, shared_mappings)


def started_s(pid: int) -> float | None:
    """When the process began, on the clock of `time.CLOCK_BOOTTIME`, to 10 ms; None if there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def children(parent: int) -> dict[str, int]:
    """Returns process ids of the children of a `tandem serve` by name: `router` or `router-PORT`, and each worker's id.

    A child that is just being started, or ended and was not waited for, is left out.
    """
    return {name: pid for pid in _child_pids(parent) if (name := _name(pid)) is not None}


def _child_pids(parent: int) -> Iterator[int]:
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                after_name = (_PROC / entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent:
                    yield int(entry)


def _words(pid: int) -> list[str]:
    """Of its command line, `python -m MODULE OPTION…`; none if it has ended; one that was forked has all in one."""
    try:
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ").split()
    except OSError:
        return []


def _name(pid: int) -> str | None:
    words = _words(pid)
    if words[1:3] == ["-m", "router"]:
        is_alone = _option(words, "--shared-listen=") in (None, "none")
        return "router" if is_alone else f"router-{(_option(words, '--listen=') or '').rpartition(':')[2]}"
    if words[1:3] in (["-m", "prefill_worker"], ["-m", "decode_worker"]):
        return _option(words, "--worker-id=")
    return None


def _option(words: list[str], name: str) -> str | None:
    return next((word.removeprefix(name) for word in words if word.startswith(name)), None)
