import pytest

from bench.instructions import total_instructions


def test_the_total_is_the_one_that_callgrind_names() -> None:
    assert total_instructions("events: Ir\nfn=(1)\n3 12\ntotals: 345\n") == 345
    assert total_instructions("summary: 7\nfn=(1)\ntotals: 7\n") == 7


@pytest.mark.parametrize("report", ["", "events: Ir\ntotals: 0\n"])
def test_a_report_without_a_count_is_no_count(report: str) -> None:
    with pytest.raises(ValueError, match="counted nothing"):
        total_instructions(report)
