"""One mistake of somebody who is new to Tandem: see `tests.mistakes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake. `{model}`, `{router}`, `{secure}`, `{token}`, … in `argv` are filled in by the test."""

    group: str
    what: str
    """What happened."""
    message: str
    """The last line on stderr, after `tandem: `."""
    remedy: str
    argv: tuple[str, ...] = ("doctor", "--model", "{model}")
    spoil: Callable[[Path], Path | str] = lambda folder: folder
    """Makes the mistake in a copy of the demo model; returns what `--model` then names."""
    own_process: bool = False
    """Whether the command would take over the signals of the tests' own process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of a process of its own; filled in as `argv` is."""
