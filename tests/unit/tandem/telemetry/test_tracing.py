from __future__ import annotations

import pytest

from tandem.errors import ConfigError
from tandem.telemetry.tracing import configure_tracing, context_from, traceparent_from_metadata, traceparent_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_survives() -> None:
    assert traceparent_of(context_from(TRACEPARENT)) == TRACEPARENT
    assert traceparent_from_metadata([("user-agent", "x"), ("traceparent", TRACEPARENT)]) == TRACEPARENT


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", b"bytes"])
def test_a_malformed_traceparent_is_replaced_by_a_new_one(value: str | bytes) -> None:
    minted = traceparent_from_metadata([("traceparent", value)])

    assert minted != value
    assert traceparent_of(context_from(minted)) == minted
    assert minted != traceparent_from_metadata(None)


def test_without_an_exporter_nothing_is_recorded() -> None:
    assert configure_tracing("router", "") is None
    assert configure_tracing("router", "none") is None


def test_an_exporter_that_is_not_installed_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no exporter named 'carrier-pigeon'"):
        configure_tracing("router", "carrier-pigeon")
