from __future__ import annotations

import pytest

from tandem.telemetry.trace_context import is_traceparent, traceparent_from_metadata

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_callers_traceparent_is_kept() -> None:
    assert traceparent_from_metadata([("user-agent", "x"), ("traceparent", TRACEPARENT)]) == TRACEPARENT


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", b"bytes"])
def test_a_malformed_traceparent_is_replaced_by_a_new_one(value: str | bytes) -> None:
    minted = traceparent_from_metadata([("traceparent", value)])

    assert minted != value
    assert is_traceparent(minted)
    assert minted != traceparent_from_metadata(None)
