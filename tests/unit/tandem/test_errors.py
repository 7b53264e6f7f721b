from __future__ import annotations

from tandem import errors
from tandem.errors import InternalError, Reason, TandemError, rebuild_error


def concrete(cls: type[TandemError]) -> set[type[TandemError]]:
    found = {cls}
    for each in cls.__subclasses__():
        if each.__module__ == errors.__name__:
            found |= concrete(each)
    return found


def test_every_reason_leads_back_to_an_error_with_that_reason() -> None:
    for reason in Reason:
        assert rebuild_error(reason.value, "why").reason is reason


def test_every_class_can_be_rebuilt_from_its_reason() -> None:
    for cls in concrete(TandemError) - {TandemError}:
        assert type(rebuild_error(cls.reason.value, "why", field="f")) is cls


def test_an_unknown_reason_is_an_internal_error() -> None:
    error = rebuild_error("FROM_THE_FUTURE", "why")

    assert type(error) is InternalError
    assert error.message == "why"
