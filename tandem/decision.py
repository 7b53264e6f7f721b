"""What a process chose by itself: plain data that `tandem status --explain` and the admin page show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """What a process chose by itself, for people."""

    name: str
    value: str
    why: str
    force: str
    """The option that chooses instead."""


def decision(name: str, value: object, option: str, given: object, why: str) -> Decision:
    """Returns the decision of a value that `option` may have given: then that is why."""
    return Decision(name, str(value), f"{option} says so" if given else why, option)
