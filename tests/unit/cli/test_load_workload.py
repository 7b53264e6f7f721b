from dataclasses import replace

import pytest

from cli.load.workload import LoadOptions, plan, warm_up
from tandem.types import TokenId

OPTIONS = LoadOptions(rate_per_s=10.0, concurrency=None, num_requests=400, prompt_tokens=20, output_tokens=10)
NEVER = frozenset({TokenId(0), TokenId(3)})


def test_the_same_seed_makes_the_same_requests() -> None:
    assert plan(OPTIONS, 50, 512, NEVER) == plan(OPTIONS, 50, 512, NEVER)
    assert plan(OPTIONS, 50, 512, NEVER) != plan(replace(OPTIONS, seed=1), 50, 512, NEVER)


def test_poisson_arrivals_come_at_the_rate_on_average() -> None:
    arrivals = [request.at_s for request in plan(OPTIONS, 50, 512, NEVER)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40, rel=0.2)


def test_fixed_arrivals_are_evenly_spaced() -> None:
    arrivals = [request.at_s for request in plan(replace(OPTIONS, arrivals="fixed", num_requests=3), 50, 512, NEVER)]
    assert arrivals == pytest.approx([0.0, 0.1, 0.2])


def test_a_closed_loop_has_no_schedule() -> None:
    planned = plan(replace(OPTIONS, rate_per_s=None, concurrency=4), 50, 512, NEVER)
    assert {request.at_s for request in planned} == {0.0}


def test_prompts_hold_only_allowed_tokens() -> None:
    used = {token_id for request in plan(OPTIONS, 50, 512, NEVER) for token_id in request.token_ids}
    assert used <= set(range(50)) - NEVER


def test_exponential_lengths_have_the_mean_asked_for() -> None:
    planned = plan(replace(OPTIONS, lengths="exponential", num_requests=2000), 50, 4096, NEVER)
    assert sum(request.max_tokens for request in planned) / len(planned) == pytest.approx(10, rel=0.1)
    assert min(request.max_tokens for request in planned) >= 1


def test_requests_fit_the_context() -> None:
    planned = plan(replace(OPTIONS, prompt_tokens=900, output_tokens=900), 50, 100, NEVER)
    assert {(len(request.token_ids), request.max_tokens) for request in planned} == {(75, 25)}


def test_warm_up_repeats_a_short_plan_as_often_as_needed() -> None:
    planned = plan(replace(OPTIONS, num_requests=2), 50, 512, NEVER)
    assert len(warm_up(replace(OPTIONS, num_warmup=5), planned)) == 5
