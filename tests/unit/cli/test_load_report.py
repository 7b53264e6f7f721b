import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.load.report import LoadReport, Sample
from cli.load.workload import LoadOptions
from simulator.outcomes import quantile

OPTIONS = LoadOptions(rate_per_s=2.0, concurrency=None, slo_ttft_s=0.2, slo_itl_s=0.05)


def sample(*arrivals: tuple[float, int], error: str = "") -> Sample:
    return Sample(
        at_s=0.0, prompt_tokens=10, arrivals=arrivals, e2e_s=arrivals[-1][0] if arrivals else 1.0, error=error
    )


def test_latencies_of_one_request() -> None:
    one = sample((0.1, 1), (0.14, 2), (0.16, 1))
    assert one.num_tokens == 4
    assert one.ttft_s == 0.1
    assert one.itl_s == pytest.approx((0.04, 0.02))
    assert one.tpot_s == pytest.approx(0.02)


def test_a_single_message_has_no_inter_token_latency() -> None:
    assert sample((0.1, 3)).tpot_s is None
    assert sample((0.1, 3)).itl_s == ()


def test_a_request_without_tokens_never_meets_a_first_token_slo() -> None:
    assert sample().ttft_s == math.inf
    assert not sample().meets(OPTIONS)


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (sample((0.2, 1), (0.25, 1)), True),
        (sample((0.21, 1)), False),
        (sample((0.1, 1), (0.2, 1)), False),
        (sample((0.1, 1), error="WORKER_LOST"), False),
    ],
)
def test_goodput_counts_what_succeeded_within_the_slo(one: Sample, good: bool) -> None:
    assert one.meets(OPTIONS) is good
    assert LoadReport(OPTIONS, "demo", 2.0, (one,)).rates_per_s["goodput_requests"] == (0.5 if good else 0.0)


def test_failed_requests_are_counted_and_have_no_latencies() -> None:
    report = LoadReport(OPTIONS, "demo", 1.0, (sample((0.1, 1)), sample((0.5, 1), error="QUEUE_FULL")))
    assert report.errors == {"QUEUE_FULL": 1}
    assert report.latencies_s["ttft"] == (0.1,)
    assert "failed with QUEUE_FULL: 1" in report.as_text()


def test_json_holds_figures_and_requests_even_if_nothing_succeeded() -> None:
    document = json.loads(LoadReport(OPTIONS, "demo", 1.0, (sample(error="QUEUE_FULL"),)).as_json())
    assert document["latencies_s"]["ttft"] is None
    assert document["requests"][0]["error"] == "QUEUE_FULL"
    assert document["options"]["rate_per_s"] == 2.0


def test_quantiles_lie_between_ranks() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([7.0], 0.99) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_within_its_values(values: list[float], share: float) -> None:
    assert min(values) <= quantile(sorted(values), share) <= max(values) * (1 + 1e-12)
