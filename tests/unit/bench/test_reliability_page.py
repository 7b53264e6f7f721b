"""Figures stand in their places on the page, and nowhere else."""

from __future__ import annotations

from typing import Any

from bench.reliability_page import render

PAGE = (
    "before\n<!-- figures: faults -->\nold\n<!-- end -->\nbetween\n<!-- figures: soak -->\nold\n<!-- end -->\nafter\n"
)
OUTCOME = {
    "fleet": "1P1D",
    "killed": "decode worker",
    "victim": "decode-0",
    "requests": 800,
    "wrong": 0,
    "failed_in_flight": 1,
    "failed_later": 2,
    "service_back_s": 1.26,
    "recovery_s": None,
}
FAULTS = {"outcomes": [OUTCOME, OUTCOME | {"fleet": "2P2D"}]}
SOAK = {
    "seed": 7,
    "rounds": ["a", "b"],
    "storm_s": 90.0,
    "faults": {"kill": 3},
    "wanted": 8,
    "served": 6,
    "calls": {"plain": {"ok": 5, "WORKER_LOST": 2}, "cancels": {"left": 1}},
    "violations": [],
}


USAGE = {"pid": 7, "descriptors": 40, "threads": 9, "rss_bytes": 3 << 20, "shared_mappings": 1}
HALF = {
    "victim": "prefill-0",
    "rounds": 25,
    "calls": 300,
    "failed": {"WORKER_LOST": 2},
    "before": {"router": USAGE},
    "after": {"router": USAGE | {"descriptors": 41}},
    "violations": [],
}


def record(results: dict[str, Any]) -> dict[str, Any]:
    return {"date": "2030-01-02", "machine": {"cores": "2"}, "results": results}


def test_a_kill_stands_beside_dynamos_figures_where_there_are_some() -> None:
    page = render(PAGE, {"faults": record(FAULTS)})

    assert "| 1P1D | decode worker | 800 | 1 | 2 | 0 | 1.3 s | never | 600 | never |\n" in page
    assert "| 2P2D | decode worker | 800 | 1 | 2 | 0 | 1.3 s | never |  |  |\n" in page
    assert "Taken 2030-01-02 on cores 2." in page


def test_the_soak_tells_its_seed_its_faults_and_every_outcome() -> None:
    page = render(PAGE, {"soak": record(SOAK)})

    assert "Seed 7, 2 rounds, 1.5 minutes of faults: 3 × kill." in page
    assert "| callers | ok | WORKER_LOST | left |" in page
    assert "Served 6 of 8" in page


def test_words_stay_and_so_do_figures_without_a_record() -> None:
    assert render(PAGE, {}) == PAGE
    page = render(PAGE, {"faults": record(FAULTS)})
    assert page.startswith("before\n")
    assert page.endswith("between\n<!-- figures: soak -->\nold\n<!-- end -->\nafter\n")
    assert render(page, {"faults": record(FAULTS)}) == page


def test_restarts_tell_what_each_survivor_held_before_and_after() -> None:
    page = render("<!-- figures: restarts -->\n<!-- end -->\n", {"restarts": record({"shm": [HALF]})})

    row = "| shm | prefill-0 | 25 | 300 | 2 × WORKER_LOST | nothing | router | 40 → 41 | 9 → 9 | 1 → 1 | 3 → 3 |\n"
    assert row in page
