"""What any worker works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.guides import Guides
from engine.prefix_cache import PrefixCache
from shell.clock import Clock
from shell.telemetry.events import ProcessEvents, WorkerEvents
from tandem.validation import Validator
from worker.ports import StepEngine


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker's core works with; the maker of these parts owns and closes each."""

    engine: StepEngine
    cache: PrefixCache
    validator: Validator
    clock: Clock
    events: WorkerEvents = field(default_factory=ProcessEvents)
    guides: Guides | None = None
    """None = constraints are refused."""
