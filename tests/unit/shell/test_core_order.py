"""Which cores go together, on made-up machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shell.core_order import CoreMap, memory_nodes, nearest_together, read_core_map
from shell.cores import plan_cores


def machine(root: Path, nodes: Mapping[int, str], siblings: Mapping[int, str]) -> Path:
    """A /sys: each node's cores, and the threads of each core's physical core."""
    for node, cores in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for core, threads in siblings.items():
        folder = root / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{threads}\n")
    return root


TWO_SOCKETS = {0: "0-1,4-5", 1: "2-3,6-7"}
TWO_THREADS = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
"""As bare machines number them: all first threads, then all second ones."""


def test_workers_of_two_sockets_get_one_each_with_both_threads_of_every_core(tmp_path: Path) -> None:
    where = read_core_map(range(8), machine(tmp_path, TWO_SOCKETS, TWO_THREADS))
    cores = nearest_together(range(8), where)
    assert cores == (0, 4, 1, 5, 2, 6, 3, 7)
    plan = plan_cores(cores, 2, 2, None)
    assert [share.cores for share in plan.prefill + plan.decode] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    plan = plan_cores(cores, 1, 1, None)
    assert [set(share.cores) for share in plan.prefill + plan.decode] == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_nodes_whose_cores_alternate_are_told_apart(tmp_path: Path) -> None:
    where = read_core_map(range(6), machine(tmp_path, {0: "0,2,4", 1: "1,3,5"}, {}))
    assert nearest_together(range(6), where) == (0, 2, 4, 1, 3, 5)


def test_threads_of_one_core_stay_together_on_a_single_node_too(tmp_path: Path) -> None:
    where = read_core_map(range(4), machine(tmp_path, {0: "0-3"}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    assert nearest_together(range(4), where) == (0, 2, 1, 3)


def test_a_process_that_may_use_some_cores_gets_those_alone(tmp_path: Path) -> None:
    usable = (1, 3, 5, 6)
    where = read_core_map(usable, machine(tmp_path, TWO_SOCKETS, TWO_THREADS))
    assert nearest_together(usable, where) == (1, 5, 6, 3)


def test_where_the_system_says_nothing_or_nonsense_the_order_is_that_of_the_numbers(tmp_path: Path) -> None:
    silent = read_core_map(range(4), tmp_path / "nothing")
    assert silent == CoreMap()
    odd = read_core_map(range(4), machine(tmp_path, {0: "", 1: "0-x"}, {0: "?"}))
    assert nearest_together(range(4), silent) == nearest_together(range(4), odd) == (0, 1, 2, 3)


def test_a_node_of_memory_alone_counts_as_a_node(tmp_path: Path) -> None:
    assert memory_nodes(machine(tmp_path, {0: "0-1", 1: ""}, {})) == {0: frozenset({0, 1}), 1: frozenset()}


@given(st.sets(st.integers(0, 63), min_size=1), st.dictionaries(st.integers(0, 63), st.integers(0, 3)))
def test_no_core_is_lost_or_made_up(cores: set[int], nodes: dict[int, int]) -> None:
    assert sorted(nearest_together(tuple(cores), CoreMap(nodes))) == sorted(cores)
