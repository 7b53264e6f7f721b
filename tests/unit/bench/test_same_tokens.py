"""Answers are held against a record: what counts as a difference."""

from __future__ import annotations

from typing import Any

import pytest

from bench.same_tokens import LOGPROB_TOLERANCE, difference, disagreements
from bench.support.random_requests import digest, make_requests


def answer(**changes: Any) -> dict[str, Any]:
    known = {"token_ids": [5, 6], "text": "ab", "finish_reason": "stop", "matched_stop": None}
    return known | {"logprobs": [[5, -0.5, [[5, -0.5]]], [6, -1.0, [[6, -1.0]]]]} | changes


def test_the_same_seed_makes_the_same_requests() -> None:
    assert digest(make_requests(50, 1)) == digest(make_requests(50, 1)) != digest(make_requests(50, 2))


def test_every_request_that_samples_has_a_seed() -> None:
    requests = make_requests(200, 3)
    assert all("seed" in each.options for each in requests if each.options.get("temperature") != 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 7]},
        {"text": "ac"},
        {"finish_reason": "length"},
        {"matched_stop": 6},
        {"logprobs": []},
        {"logprobs": [[5, -0.5, [[5, -0.5]]], [6, -1.0 - 2 * LOGPROB_TOLERANCE, [[6, -1.0]]]]},
        {"logprobs": [[5, -0.5, [[5, -0.5]]], [6, -1.0, [[6, -1.0 - 2 * LOGPROB_TOLERANCE]]]]},
    ],
)
def test_every_part_of_an_answer_can_differ(changes: dict[str, Any]) -> None:
    assert difference(answer(), answer(**changes)) is not None


def test_near_log_probabilities_are_the_same() -> None:
    near = [[5, -0.5, [[5, -0.5]]], [6, -1.0 - LOGPROB_TOLERANCE / 2, [[6, -1.0]]]]
    assert difference(answer(), answer(logprobs=near)) is None


def test_a_cluster_that_says_something_else_is_named() -> None:
    answers = {"shm/1": answer(), "tcp/2": answer(), "colocated/1": answer(), "colocated/2": answer(text="x")}
    assert list(disagreements(answers)) == ["2"]
