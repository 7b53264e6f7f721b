"""What a worker tells routers of the prompts that they are to leave to it."""

from __future__ import annotations

import pytest

from decode_worker.app import MAX_LOCAL_TOKENS, announced_local_tokens
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
