"""Which cores lie near each other: those of one memory node, and the threads of one physical core, as the system says.

Whoever splits cores in this order splits few nodes and few physical cores. A worker whose threads are on two nodes
reads weights and KV from the far one; two workers with threads on one physical core take turns on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shell.cores import usable_cores

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class CoreMap:
    """Places of cores, as far as the system tells."""

    nodes: Mapping[int, int] = field(default_factory=dict)
    """Memory node, by core."""
    siblings: Mapping[int, int] = field(default_factory=dict)
    """The first thread of the same physical core, by core."""


def neighbouring_cores() -> tuple[int, ...]:
    """The cores that this process may run on, neighbours beside each other."""
    cores = usable_cores()
    return nearest_together(cores, read_core_map(cores))


def nearest_together(cores: Sequence[int], where: CoreMap) -> tuple[int, ...]:
    """`cores` by node, then by physical core. What is not known changes no order."""
    return tuple(sorted(cores, key=lambda core: (where.nodes.get(core, 0), where.siblings.get(core, core), core)))


def read_core_map(cores: Sequence[int], sysfs: Path = SYSFS) -> CoreMap:
    """Reads this machine's map; empty where the system does not tell."""
    nodes = {core: node for node, own in memory_nodes(sysfs).items() for core in own}
    siblings = {core: min(own) for core in cores if (own := _cores_in(_siblings_file(core, sysfs)))}
    return CoreMap(nodes, siblings)


def memory_nodes(sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """The cores of each memory node, by its number; none where the system does not say."""
    folders = (sysfs / "devices/system/node").glob("node[0-9]*")
    return {int(folder.name.removeprefix("node")): _cores_in(folder / "cpulist") for folder in folders}


def _siblings_file(core: int, sysfs: Path) -> Path:
    return sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"


def _cores_in(file: Path) -> frozenset[int]:
    """What a file names as `0-3,8-11`; none if it is missing, empty or something else."""
    try:
        ranges = [part.partition("-") for part in file.read_text(encoding="ascii").strip().split(",") if part]
        return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
