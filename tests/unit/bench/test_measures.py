"""Ratios of pairs, the measures of the house, and the pages that are rendered from records."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import report
from bench.before_after import as_markdown, ratios
from bench.lines import is_unclear
from bench.support.pairs import paired_ratio, student_t


def test_a_paired_ratio_has_the_interval_of_students_t() -> None:
    found = paired_ratio([1.0, 2.0, 4.0], [1.1, 2.2, 4.4])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    noisy = paired_ratio([1.0, 1.0], [1.0, 2.0])
    assert noisy is not None
    assert noisy.mean == pytest.approx(2**0.5)
    assert noisy.high == pytest.approx(2**0.5 * 2 ** (12.706 / 2), rel=1e-3)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (19, 2.093)])
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=5e-3)


def test_only_figures_that_both_sides_have_are_compared() -> None:
    rounds = {"before": [{"a": 2.0, "old": 1.0}] * 2, "after": [{"a": 1.0, "new": 1.0}] * 2}
    found = ratios(rounds)
    assert list(found) == ["a"]
    assert "| a | 2 | 1 | 0.500 | 0.500 to 0.500 |" in as_markdown(found)


@pytest.mark.parametrize(
    ("docstring", "unclear"),
    [
        ("Those after them that are retained here.", True),
        ("Of one request.", True),
        ("Returns the blocks still to be sent.", False),
        ("A file without a name, gone when it is closed.", True),
        ("Returns what a worker holds at the end of a round, in the order in which it came to hold it.", False),
    ],
)
def test_docstrings_whose_subject_is_a_pronoun(docstring: str, unclear: bool) -> None:
    assert is_unclear(docstring) is unclear


def test_the_pages_are_those_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_the_chart_is_drawn_from_the_records(tmp_path: Path) -> None:
    report.draw_chart(report.read_records(), tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text().count("AMX")
