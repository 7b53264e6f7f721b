"""What the batch does while a hand-off is under way: how many sequences end, how many steps pass. Knows no clock.

By Little's law, seats stay filled if as many hand-offs are under way as sequences end in the time that one takes. A
hand-off that stalls sees many ends: hence the bound and the moving averages.
"""

from __future__ import annotations

from worker.request import Request

_WEIGHT = 1 / 8
"""Of the newest hand-off in the moving averages."""


class HandoffPace:
    """Learned from the hand-offs that landed on one worker."""

    def __init__(self, most_ends: int, first_guess_steps: int) -> None:
        """`most_ends`: the largest value that `num_ends` takes; `first_guess_steps`: `num_steps` at the start."""
        self._most_ends = most_ends
        self._num_ended = 0
        self._under_way: dict[Request, tuple[int, int | None]] = {}
        """How many sequences and steps had ended when each started; None steps = none ran."""
        self.num_ends = 0.0
        """Sequences that end during a hand-off."""
        self._knows_steps = False
        self.num_steps = float(first_guess_steps)
        """Steps that end during a hand-off, if any sequence runs."""

    def started(self, request: Request, num_steps: int | None) -> None:
        """Its hand-off is under way. `num_steps`: steps that have ended so far; None = no sequence runs."""
        self._under_way[request] = self._num_ended, num_steps

    def landed(self, request: Request, num_steps: int | None) -> None:
        """Its hand-off has brought all blocks; `num_steps` as in `started`."""
        first_end, first_step = self._under_way.pop(request)
        self.num_ends += _WEIGHT * (min(self._num_ended - first_end, self._most_ends) - self.num_ends)
        if first_step is not None and num_steps is not None:  # else they were fewer than in a busy worker
            weight = _WEIGHT if self._knows_steps else 1
            self.num_steps += weight * (num_steps - first_step - self.num_steps)
            self._knows_steps = True

    def ended(self, num_seqs: int) -> None:
        """So many sequences of the batch have ended."""
        self._num_ended += num_seqs

    def forget(self, request: Request) -> None:
        """Its hand-off will not land. A no-op if it is not under way."""
        self._under_way.pop(request, None)
