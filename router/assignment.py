"""A request's pair of workers."""

from __future__ import annotations

from dataclasses import dataclass

from router.ejection import Subject
from router.placement import Placement


@dataclass(frozen=True, slots=True)
class Assignment:
    """Counted as load of its workers from `Workers.place` until `Workers.end`."""

    placement: Placement
    num_tokens: int
    """Tokens that the decode worker lacked."""
    num_seqs: int
    probe: int
    """For `Ejections.end`."""

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Whom its fate says something of."""
        incarnations = self.placement.incarnations
        return incarnations if self.placement.prefill is None else (*incarnations, (incarnations[0], incarnations[1]))
