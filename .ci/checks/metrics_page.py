"""Keeps the tables of docs/observability.md equal to the declared metrics; `--write` renews them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from shell.telemetry import gen_ai_names, metric_names, vllm_names
from shell.telemetry.gen_ai_names import prometheus_name
from shell.telemetry.metric import EVERYWHERE, WORKERS, Alias, Metric, Process

PAGE = Path(__file__).resolve().parents[2] / "docs/observability.md"
_PLACES: dict[tuple[Process, ...], str] = {EVERYWHERE: "all", WORKERS: "workers"}


def with_tables(page: str) -> str:
    """The page with its tables as they must be. Raises ValueError if it has no place for one."""
    rows = map(_row, (*metric_names.ALL, *gen_ai_names.ALL))
    page = _between(page, "metrics", _table(("metric", "kind", "labels", "on", "means"), rows))
    aliases = (row for alias in vllm_names.ALL for row in _alias_rows(alias))
    return _between(page, "aliases", _table(("alias", "on", "stands for"), aliases))


def main() -> int:
    """0 if the page is true."""
    page = PAGE.read_text()
    if "--write" in sys.argv:
        PAGE.write_text(with_tables(page))
    elif page != with_tables(page):
        print("docs/observability.md is stale; run python .ci/checks/metrics_page.py --write")
        return 1
    return 0


def _between(page: str, name: str, table: str) -> str:
    head, begin, rest = page.partition(f"<!-- {name}: made by .ci/checks/metrics_page.py -->\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
    if not begin or not end:
        raise ValueError(f"the page has no place for the table of {name}")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(metric: Metric) -> tuple[str, ...]:
    labels = " ".join(f"`{prometheus_name(label)}`" for label in metric.labels)
    return f"`{prometheus_name(metric.name)}`", metric.kind, labels, _place(metric.on), metric.text


def _alias_rows(alias: Alias) -> Iterable[tuple[str, ...]]:
    """One for each metric that it stands for."""
    for metric in alias.of:
        only = ", ".join(f'{label}="{value}"' for label, value in zip(metric.labels, alias.only, strict=False))
        yield f"`{alias.name}`", _place(metric.on), f"`{metric.name}{{{only}}}`" if only else f"`{metric.name}`"


def _place(on: tuple[Process, ...]) -> str:
    return _PLACES.get(on, ", ".join(on))


if __name__ == "__main__":
    sys.exit(main())
