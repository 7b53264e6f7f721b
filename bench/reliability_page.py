"""Renders the figures of `docs/reliability.md` from `bench/results/*.json`: `python -m bench.reliability_page`.

The page's words are written by hand; what stands between `<!-- figures: NAME -->` and `<!-- end -->` comes from here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench.page import RESULTS, ROOT, Record
from bench.soak_calls import NOT_COUNTED, WANTS_ANSWER
from bench.support.markdown import table

PAGE = ROOT / "docs" / "reliability.md"
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DYNAMO: Mapping[tuple[str, str], tuple[str, str]] = {
    ("1P1D", "decode-0"): ("600", "never"),
    ("1P1D", "prefill-0"): ("2", "42 s"),
    ("1P1D", "router"): ("136", "17 s"),
}
"""Failed requests and recovery by its tests/fault_tolerance/README.md at commit 01d7aed, of 800 requests."""


def render(page: str, records: Mapping[str, Record]) -> str:
    """The page with the figures of these records, which are named as their places; others stay as they are."""

    def place(found: re.Match[str]) -> str:
        name = found[2]
        if name not in records:
            return found[0]
        record = records[name]
        machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
        return f"{found[1]}{SECTIONS[name](record['results'])}\nTaken {record['date']} on {machine}.\n{found[3]}"

    return _PLACE.sub(place, page)


def faults_section(results: Mapping[str, Any]) -> str:
    """One row per kill, beside Dynamo's figures."""
    header = (
        *("fleet", "killed", "requests", "failed, in flight", "failed, later", "wrong"),
        *("service back", "recovery", "Dynamo: failed", "recovery"),
    )
    return table(header, [_fault_row(each) for each in results["outcomes"]])


def _fault_row(each: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (each["requests"], each["failed_in_flight"], each["failed_later"], each["wrong"])
    dynamo = _DYNAMO.get((each["fleet"], each["victim"]), ("", ""))
    times = (_seconds(each["service_back_s"]), _seconds(each["recovery_s"]))
    return (each["fleet"], each["killed"], *map(str, counts), *times, *dynamo)


def soak_section(results: Mapping[str, Any]) -> str:
    """What was done, what callers met, what was violated."""
    outcomes = sorted(
        {outcome for each in results["calls"].values() for outcome in each}, key=lambda each: (each != "ok", each)
    )
    calls = [
        (manner, *(str(each.get(outcome, 0)) for outcome in outcomes)) for manner, each in results["calls"].items()
    ]
    faults = ", ".join(f"{count} × {what}" for what, count in sorted(results["faults"].items()))
    lost = sum(results["calls"].get(manner, {}).get(each, 0) for manner in WANTS_ANSWER for each in NOT_COUNTED)
    stayed = results["wanted"] - lost
    found = "".join(f", {count} {sort}" for sort, count in results.get("found", {}).items())
    lines = (
        f"Seed {results['seed']}, {len(results['rounds'])} rounds, {results['storm_s'] / 60:.1f} minutes of faults: "
        f"{faults}.\n",
        table(("callers", *outcomes), calls),
        f"Served {results['served']} of {stayed} calls that wanted an answer and had time for it, and whose connection "
        f"stayed ({results['served'] / max(1, stayed):.1%}). Violations: {len(results['violations'])}{found}.\n",
    )
    return "\n".join(lines)


def restarts_section(results: Mapping[str, Any]) -> str:
    """One row per survivor of each half: what it held before, and after."""
    header = (
        *("transport", "killed", "times", "calls", "failed", "wrong, left over", "survivor"),
        *("descriptors", "threads", "shared mappings", "MiB"),
    )
    rows = []
    for transport, halves in results.items():
        for half in halves:
            failed = ", ".join(f"{count} × {what}" for what, count in half["failed"].items()) or "0"
            violations = "; ".join(half["violations"]) or "nothing"
            counts = (transport, half["victim"], str(half["rounds"]), str(half["calls"]), failed, violations)
            rows += [(*counts, name, *_growth(then, half["after"][name])) for name, then in half["before"].items()]
    return table(header, rows)


def _growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    held = [f"{before[what]} → {after[what]}" for what in ("descriptors", "threads", "shared_mappings")]
    return [*held, f"{before['rss_bytes'] / 2**20:.0f} → {after['rss_bytes'] / 2**20:.0f}"]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "faults": faults_section,
    "soak": soak_section,
    "restarts": restarts_section,
}


def main() -> int:
    """Writes the page."""
    records = {stem: json.loads(path.read_text()) for stem in SECTIONS if (path := RESULTS / f"{stem}.json").exists()}
    PAGE.write_text(render(PAGE.read_text(), records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
