"""What a worker tells routers of the prompts that they are to leave to it."""

from __future__ import annotations

import pytest

from decode_worker.app import MAX_LOCAL_TOKENS, announced_local_tokens
from decode_worker.worker import objective
from shell.config import DecodeConfig


@pytest.mark.parametrize(
    ("elastic", "option", "announced"),
    [
        (False, 0, 0),
        (False, 128, 128),
        (False, None, None),
        (True, 0, None),  # the default: placement decides
        (True, 128, 128),
        (True, None, MAX_LOCAL_TOKENS),
    ],
)
def test_an_elastic_worker_keeps_prompts_only_if_it_is_told_to(
    elastic: bool, option: int | None, announced: int | None
) -> None:
    assert announced_local_tokens(DecodeConfig(elastic=elastic, local_prefill_tokens=option)) == announced


@pytest.mark.parametrize(
    ("elastic", "option_s", "objective_s", "value", "is_asked"),
    [
        (True, None, None, "2.2 times the shortest decode step", False),
        (False, None, 0.0, "none", False),
        (True, 0.0, 0.0, "none", True),
        (False, 0.05, 0.05, "0.05 s", True),
    ],
)
def test_the_objective_says_whether_it_was_asked_for(
    elastic: bool, option_s: float | None, objective_s: float | None, value: str, is_asked: bool
) -> None:
    found_s, told = objective(DecodeConfig(elastic=elastic, inter_token_objective_s=option_s))
    assert (found_s, told.value) == (objective_s, value)
    assert (told.why == "--inter-token-objective says so") is is_asked
