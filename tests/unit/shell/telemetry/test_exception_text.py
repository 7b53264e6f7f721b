"""Tracebacks that say where and what, and quote nobody."""

from __future__ import annotations

from shell.telemetry.logging import WITHHELD, exception_text
from tandem.errors import PeerLost


def caught(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as raised:  # noqa: BLE001
        return raised


def test_what_led_to_it_is_told_first_and_quotes_nobody_either() -> None:
    error = caught(RuntimeError("outer prompt"), caught(LookupError("inner prompt")))

    text = exception_text(error, with_messages=False)

    assert text.index("LookupError") < text.index("which led to:") < text.index("RuntimeError")
    assert "prompt" not in text


def test_what_went_wrong_in_parallel_is_told_one_by_one() -> None:
    error = caught(ExceptionGroup("tasks", [caught(ValueError("a prompt")), caught(PeerLost("prefill-0 is gone"))]))

    text = exception_text(error, with_messages=False)

    assert f"  builtins.ValueError: {WITHHELD}" in text
    assert "  tandem.errors.PeerLost: prefill-0 is gone" in text


def test_an_endless_chain_ends() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__context__, second.__context__ = second, first

    assert exception_text(first, with_messages=True).count("which led to:") == 8


def test_the_systems_errors_say_what_they_say() -> None:
    assert "/no/such" in exception_text(caught(FileNotFoundError(2, "missing", "/no/such")), with_messages=False)
